"""The placement of sandboxes on hosts: best of K random choices.

Pure and deterministic: no I/O, no clock (time is given), one seeded generator. The fleet and the simulation
of 100,000 sandboxes run this very code.

A placement draws K hosts at random, and takes the one with the least *score*: its worst pressure (processor,
memory, disk; measured, plus what was promised since the measurement). So no decision scans all hosts, unless
none of those drawn has room. Source: Mitzenmacher, The Power of Two Choices in Randomized Load
Balancing, 2001.

A promise is counted in three states: *in flight* from `place` to `confirm`; *fresh* until a report that was
measured after the confirmation; *measured* from then on, when the reported pressure contains it.
The sum of all promises is bounded whatever the measurement says.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping

from etude.errors import ConfigError
from etude.sandbox.errors import SandboxMissingError
from etude.sandbox.fleet.hosts import Capacity, HostState, Placement, Policy, Pressure, Request, Reservation
from etude.sandbox.types import Resources

_SUSPICION = 1e9
"""Penalty on the score of a suspected host: more than any pressure."""


class Scheduler:
    """Places sandboxes on hosts. Not thread-safe; times are seconds of one monotonic clock."""

    def __init__(
        self, hosts: Mapping[str, Capacity] | None = None, policy: Policy | None = None, seed: int = 0
    ) -> None:
        self.policy = policy or Policy()
        self.utilization = [1.0, 1.0, 1.0]
        self.hosts: dict[str, HostState] = {}
        self._open: list[HostState] = []
        """Living hosts that are not retired."""
        self._reservations: dict[int, Reservation] = {}
        self._by_sandbox: dict[str, Reservation] = {}
        self._tickets = itertools.count(1)
        self._random = random.Random(seed)
        for name, capacity in (hosts or {}).items():
            self.add_host(name, capacity)

    def add_host(self, name: str, capacity: Capacity) -> None:
        """Adds an empty host; also a dead one that answers again, which stays retired if it was.

        Raises ConfigError if a living host has the name.
        """
        known = self.hosts.get(name)
        if known is not None and known.alive:
            raise ConfigError(
                "two hosts have one name", field="hosts", received=name, fix="give each host its own name"
            )
        host = HostState(name, capacity, self.policy, self.utilization)
        self.hosts[name] = host
        if known is not None:
            host.retiring = known.retiring
        if host.is_open:
            self._open.append(host)

    def remove_host(self, name: str) -> None:
        """Removes a host that runs nothing, or is dead."""
        state = self.hosts[name]
        assert not state.reservations, "a host is removed only without reservations"
        self.mark_dead(name)
        del self.hosts[name]

    def place(self, request: Request, now_s: float) -> Placement | None:
        """Reserves a place; None if no host has room. It stays reserved until cancelled or released."""
        best, least = None, math.inf
        for host in self._candidates(request):
            score = self._score(host, request, now_s)
            if score < least:
                best, least = host, score
        if least >= _SUSPICION and request.only is None:
            for host in self._open:
                score = self._score(host, request, now_s)
                if score < least:
                    best, least = host, score
        return None if best is None else self._reserve(best, request.demand)

    def confirm(self, ticket: int, sandbox: str, now_s: float) -> None:
        """Binds a reservation to a sandbox that now runs. Raises SandboxMissingError if the host died."""
        reservation = self._reservations.get(ticket)
        if reservation is None:
            raise SandboxMissingError("no such reservation", field="ticket", received=ticket)
        reservation.sandbox, reservation.confirmed_s = sandbox, now_s
        self._by_sandbox[sandbox] = reservation

    def cancel(self, ticket: int) -> None:
        """Frees a reservation whose sandbox was not created. Idempotent."""
        reservation = self._reservations.pop(ticket, None)
        if reservation is not None:
            reservation.host.free(reservation)

    def release(self, sandbox: str) -> None:
        """Frees the reservation of a sandbox that has ended. Idempotent."""
        reservation = self._by_sandbox.pop(sandbox, None)
        if reservation is not None:
            self.cancel(reservation.ticket)

    def adopt(self, host: str, sandbox: str, demand: Resources, now_s: float) -> None:
        """Reserves for a sandbox that was found running on a host, even a full one. Idempotent."""
        if sandbox not in self._by_sandbox:
            placement = self._reserve(self.hosts[host], demand)
            self.confirm(placement.ticket, sandbox, now_s)

    def report(self, host: str, pressure: Pressure, measured_s: float) -> None:
        """Records the pressure of a host; sandboxes confirmed before `measured_s` count as included in it."""
        self.hosts[host].report(pressure, measured_s)

    def mark_dead(self, host: str) -> list[str]:
        """Marks a host dead and frees its reservations; returns the sandboxes that ran there. Idempotent."""
        state = self.hosts[host]
        if state.alive:
            state.alive = False
            self._close(state)
        lost = [row.sandbox for row in state.reservations.values() if row.sandbox is not None]
        for sandbox in lost:
            del self._by_sandbox[sandbox]
        for ticket in list(state.reservations):
            self.cancel(ticket)
        return lost

    def reopen(self, host: str) -> None:
        """Accepts sandboxes on a retired host again. Idempotent."""
        state = self.hosts[host]
        if state.retiring:
            state.retiring = False
            if state.alive:
                self._open.append(state)

    def retire(self, host: str) -> None:
        """Places no new sandboxes on the host; those there stay, and may be forked there. `reopen` undoes it.
        Idempotent."""
        state = self.hosts[host]
        state.retiring = True
        self._close(state)

    def place_fork(self, sandbox: str, count: int, now_s: float) -> list[Placement | None]:
        """Reserves places for copies: on the sandbox's own host while it has room, then on other hosts.

        Raises SandboxMissingError.
        """
        source = self._by_sandbox.get(sandbox)
        if source is None:
            raise SandboxMissingError("no such sandbox in the fleet", field="sandbox", received=sandbox)
        request = Request(source.demand)
        here = source.host
        places: list[Placement | None] = []
        for _ in range(count):
            if here.alive and here.pressure_with(request.demand) < math.inf:
                places.append(self._reserve(here, request.demand))
            else:
                places.append(self.place(request, now_s))
        return places

    def _candidates(self, request: Request) -> Iterable[HostState]:
        if request.only is not None:
            host = self.hosts.get(request.only)
            return [host] if host is not None and host.alive else []
        count = len(self._open)
        if count <= self.policy.choices:
            return list(self._open)
        uniform = self._random.random
        return [self._open[int(uniform() * count)] for _ in range(self.policy.choices)]

    def _score(self, host: HostState, request: Request, now_s: float) -> float:
        if host.retiring and request.only != host.name:
            return math.inf
        if host.name in request.exclude:
            return math.inf
        score = host.pressure_with(request.demand)
        if host.suspected_until_s > now_s:
            score += _SUSPICION
        return score

    def _reserve(self, host: HostState, demand: Resources) -> Placement:
        ticket = next(self._tickets)
        self._reservations[ticket] = reservation = Reservation(ticket, host, demand)
        host.reserve(reservation)
        return Placement(ticket, host.name)

    def _close(self, host: HostState) -> None:
        if host in self._open:
            self._open.remove(host)
