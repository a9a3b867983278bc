"""One simulated host: its start slots, and the resources that its sandboxes use."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from benchmarks.simulation.fleet.scenario import Scenario

from etude.sandbox.fleet.hosts import Pressure


@dataclass(slots=True, eq=False)
class Start:
    """State of one request of the burst."""

    asked_s: float = 0.0
    ticket: int = 0
    running: bool = False
    done_s: float = 0.0


class SimulatedHost:
    """A host with a number of start slots and a resource usage."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.name = name
        self.alive = True
        self.last_beat_s = 0.0
        self._scenario = scenario
        self._free_s = [0.0] * scenario.create_slots
        self._used = [0.0, 0.0, 0.0]

    def begin_create(self, now_s: float, duration_s: float) -> float:
        """Schedules a start of this duration in the first free slot; returns its end time."""
        end_s = max(now_s, self._free_s[0]) + duration_s
        heapq.heapreplace(self._free_s, end_s)
        return end_s

    def run(self, source: random.Random) -> None:
        """Adds a running sandbox with a random usage."""
        scenario, capacity, policy = self._scenario, self._scenario.capacity, self._scenario.policy
        demand = scenario.demand
        shares = (
            demand.cpus / (capacity.cpus * policy.cpu_overcommit),
            demand.memory_bytes / (capacity.memory_bytes * policy.memory_overcommit),
            demand.disk_bytes / (capacity.disk_bytes * policy.disk_overcommit),
        )
        for place, share in enumerate(shares):
            self._used[place] += share * source.expovariate(1 / scenario.mean_use)

    def pressure(self) -> Pressure:
        """The pressure that a probe of this host would measure."""
        return Pressure(*self._used)
