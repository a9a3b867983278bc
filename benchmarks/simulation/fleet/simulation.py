"""A burst of sandboxes on simulated hosts, placed by the real scheduler.

A discrete-event simulation: virtual clock, one serial control plane. A start goes

    request -> control plane (`Scheduler.place`) -> host -> create slot -> running

and is repeated for the sandboxes of a dead host once missed heartbeats have revealed its death: until then
the scheduler keeps sending starts there, as a real one would. The outcome is a function of the scenario, real
times excepted.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from dataclasses import astuple

from benchmarks.simulation.fleet.scenario import Outcome, Scenario
from benchmarks.simulation.fleet.simulated_host import SimulatedHost, Start
from benchmarks.simulation.flows import VirtualClock

from etude.sandbox.errors import CapacityError
from etude.sandbox.fleet.hosts import Request
from etude.sandbox.fleet.scheduler import Scheduler


def simulate(scenario: Scenario) -> Outcome:
    """Runs one burst to its end. Raises CapacityError if it cannot end."""
    return _Burst(scenario).run()


class _Burst:
    """State of one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.random = random.Random(scenario.seed)
        self.hosts = {
            f"host-{n:04d}": SimulatedHost(f"host-{n:04d}", scenario) for n in range(scenario.num_hosts)
        }
        capacities = dict.fromkeys(self.hosts, scenario.capacity)
        self.scheduler = Scheduler(capacities, scenario.policy, scenario.seed)
        self.starts = [Start() for _ in range(scenario.num_sandboxes)]
        self.pending = deque(self.starts)
        """Starts not placed yet, in order."""
        self.dispatching = False
        self.sent: dict[int, Start] = {}
        """Ticket -> start, running ones included."""
        self.num_running = 0
        self.num_placements = 0
        self.scheduler_s = 0.0
        self.burst_s = 0.0
        self.died_s = 0.0
        self.deaths_to_come = scenario.num_deaths
        """Number of hosts whose death is to come or not detected yet."""
        self.lost: list[Start] = []

    def run(self) -> Outcome:
        """Simulates the burst until all sandboxes run."""
        scenario = self.scenario
        for number, host in enumerate(self.hosts.values()):
            offset_s = scenario.latencies.heartbeat_s * number / scenario.num_hosts
            self.clock.at(offset_s, lambda host=host: self._beat(host))
        if scenario.num_deaths:
            self.clock.at(scenario.death_at_s, self._die)
        self._dispatch_soon()
        self.clock.run(self._is_over)
        return self._outcome()

    def _is_over(self) -> bool:
        if self.clock.now_s > self.scenario.limit_s:
            raise CapacityError(
                "the simulated burst does not end",
                field="num_sandboxes",
                received=f"{self.num_running} of {self.scenario.num_sandboxes} running",
                fix="give the hosts more room, or the policy more overcommit",
            )
        return self.num_running == self.scenario.num_sandboxes and not self.deaths_to_come

    # The control plane: one request after the other.

    def _dispatch_soon(self) -> None:
        if not self.dispatching and self.pending:
            self.dispatching = True
            self.clock.after(self.scenario.latencies.dispatch_s, self._dispatch)

    def _dispatch(self) -> None:
        self.dispatching = False
        start = self.pending[0]
        request = Request(self.scenario.demand)
        began = time.perf_counter()
        placement = self.scheduler.place(request, self.clock.now_s)
        self.scheduler_s += time.perf_counter() - began
        self.num_placements += 1
        if placement is None:
            # Full: the next heartbeat of a host triggers another attempt.
            return
        self.pending.popleft()
        start.ticket = placement.ticket
        self.sent[placement.ticket] = start
        host = self.hosts[placement.host]
        self.clock.after(self._rpc(), lambda: self._receive(host, start, placement.ticket))
        self._dispatch_soon()

    def _beat(self, host: SimulatedHost) -> None:
        if not host.alive:
            return
        host.last_beat_s = self.clock.now_s
        self.scheduler.report(host.name, host.pressure(), self.clock.now_s)
        self._dispatch_soon()
        self.clock.after(self.scenario.latencies.heartbeat_s, lambda: self._beat(host))

    def _running(self, host: SimulatedHost, start: Start, ticket: int) -> None:
        """Handles a host's answer that a sandbox runs; it is valid even if the host has died since."""
        if start.ticket != ticket:
            return
        self.scheduler.confirm(ticket, str(ticket), self.clock.now_s)
        start.running, start.done_s = True, self.clock.now_s
        self.num_running += 1
        if self.num_running == self.scenario.num_sandboxes:
            self.burst_s = self.clock.now_s

    # The hosts.

    def _receive(self, host: SimulatedHost, start: Start, ticket: int) -> None:
        if not host.alive:
            return
        duration_s = self.scenario.latencies.create.sample(self.random)
        end_s = host.begin_create(self.clock.now_s, duration_s)
        self.clock.at(end_s, lambda: self._created(host, start, ticket))

    def _created(self, host: SimulatedHost, start: Start, ticket: int) -> None:
        if host.alive:
            host.run(self.random)
            self.clock.after(self._rpc(), lambda: self._running(host, start, ticket))

    # Death.

    def _die(self) -> None:
        latencies = self.scenario.latencies
        self.died_s = self.clock.now_s
        for host in self.random.sample(list(self.hosts.values()), self.scenario.num_deaths):
            host.alive = False
            # A heartbeat counts as missed when its own deadline is over.
            detected_s = host.last_beat_s + (latencies.missed_heartbeats + 1) * latencies.heartbeat_s
            self.clock.at(detected_s, lambda host=host: self._on_host_dead(host))

    def _on_host_dead(self, host: SimulatedHost) -> None:
        self.deaths_to_come -= 1
        lost = list(self.scheduler.hosts[host.name].reservations)
        self.scheduler.mark_dead(host.name)
        for ticket in lost:
            start = self.sent.pop(ticket)
            if start.running:
                start.running, start.asked_s = False, self.clock.now_s
                self.num_running -= 1
            start.ticket = 0
            self.lost.append(start)
            self.pending.append(start)
        self._dispatch_soon()

    def _rpc(self) -> float:
        return self.scenario.latencies.rpc.sample(self.random)

    # Figures.

    def _outcome(self) -> Outcome:
        waits = [start.done_s - start.asked_s for start in self.starts]
        cuts = statistics.quantiles(waits, n=100, method="inclusive")
        living = [host for host in self.hosts.values() if host.alive]
        worst = [max(astuple(host.pressure())) for host in living]
        promised = [self.scheduler.hosts[host.name].promised[1] for host in living]
        recovered_s = max((start.done_s for start in self.lost), default=self.died_s)
        return Outcome(
            burst_s=self.burst_s,
            start_p50_s=cuts[49],
            start_p99_s=cuts[98],
            pressure_mean=statistics.fmean(worst),
            pressure_spread=max(worst) - min(worst),
            promised_spread=(max(promised) - min(promised)) / self.scenario.capacity.memory_bytes,
            lost=len(self.lost),
            recover_s=recovered_s - self.died_s,
            bounds_s=self._bounds(),
            num_placements=self.num_placements,
            scheduler_s=self.scheduler_s,
        )

    def _bounds(self) -> dict[str, float]:
        """Lower bounds of the burst's time by each resource alone."""
        scenario, latencies = self.scenario, self.scenario.latencies
        slots = scenario.num_hosts * min(scenario.create_slots, scenario.capacity.cpus)
        return {
            "control plane": scenario.num_sandboxes * latencies.dispatch_s,
            "starts": scenario.num_sandboxes * latencies.create.mean_s / slots,
        }
