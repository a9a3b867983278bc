"""Where sandboxes go: best of K random hosts, near their image if that costs little.

Pure and deterministic: no I/O, no clock (time is given), one seeded generator. The fleet and the simulation
of 100,000 sandboxes run this very code.

A placement draws K hosts at random, and a few of those that have the image, and takes the one with the least
*score*: its worst pressure (processor, memory, disk; measured, plus what was promised since the measurement)
plus the cost of waiting for the image. So no decision looks at all hosts, unless none of those
drawn has room. Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.

A promise is counted in three states: *in flight* from `place` to `confirm`; *fresh* until a report that was
measured after the confirmation; *settled* from then on, when the measured pressure contains it.
What was promised in all is bounded whatever the measurement says.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Mapping

from etude.errors import ConfigError
from etude.sandbox.errors import SandboxMissingError
from etude.sandbox.fleet.hosts import (
    CACHED,
    Capacity,
    Demand,
    HostState,
    Lost,
    Placement,
    Policy,
    Pressure,
    Request,
    Reservation,
    Use,
)

_SUSPICION = 1e9
"""Added to the score of a suspected host: more than any pressure."""

MAX_IMAGES = 100_000
_MAX_EXPONENT = 500.0
"""2 to this power is still far from the largest float."""


class Popularity:
    """How often each image was asked for lately: counts that halve with every half-life.

    Instead of all counts decaying, each new one weighs more.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._epoch_s: float | None = None
        self._counts: dict[str, float] = {}

    def add(self, image: str, now_s: float) -> None:
        """One more request for an image."""
        weight = 2.0 ** self._exponent(now_s)
        self._counts[image] = self._counts.get(image, 0.0) + weight
        if len(self._counts) > MAX_IMAGES:
            self._forget()

    def count(self, image: str, now_s: float) -> float:
        """Requests of late: one made just now counts 1, one made a half-life ago 0.5."""
        return self._counts.get(image, 0.0) / 2.0 ** self._exponent(now_s)

    def _exponent(self, now_s: float) -> float:
        if self._epoch_s is None:
            self._epoch_s = now_s
        exponent = (now_s - self._epoch_s) / self._half_life_s
        if exponent > _MAX_EXPONENT:
            scale = math.ldexp(1.0, -int(_MAX_EXPONENT))
            self._counts = {image: count * scale for image, count in self._counts.items()}
            self._epoch_s += int(_MAX_EXPONENT) * self._half_life_s
            return self._exponent(now_s)
        return exponent

    def _forget(self) -> None:
        """Drops the less popular half."""
        kept = heapq.nlargest(MAX_IMAGES // 2, self._counts, key=self._counts.__getitem__)
        self._counts = {image: self._counts[image] for image in kept}


class Scheduler:
    """Places sandboxes on hosts. Not thread-safe; times are seconds of one monotonic clock."""

    def __init__(
        self, hosts: Mapping[str, Capacity] | None = None, policy: Policy | None = None, seed: int = 0
    ) -> None:
        self.policy = policy or Policy()
        self.use = Use()
        self.hosts: dict[str, HostState] = {}
        self.popularity = Popularity(self.policy.popularity_half_life_s)
        self._open: list[HostState] = []
        """Living hosts that are not retired."""
        self._holders: dict[str, list[HostState]] = {}
        """Image -> hosts that have it or fetch it."""
        self._reservations: dict[int, Reservation] = {}
        self._by_sandbox: dict[str, Reservation] = {}
        self._tickets = itertools.count(1)
        self._random = random.Random(seed)
        for name, capacity in (hosts or {}).items():
            self.add_host(name, capacity)

    def add_host(self, name: str, capacity: Capacity) -> None:
        """A new, empty host; also one that comes back after its death, retired if it was.

        Raises ConfigError if one of that name lives.
        """
        known = self.hosts.get(name)
        if known is not None and known.alive:
            raise ConfigError(
                "two hosts of one name", field="hosts", received=name, fix="give each host a name of its own"
            )
        host = HostState(name, capacity, self.policy, self.use)
        self.hosts[name] = host
        if known is not None:
            host.retiring = known.retiring
        if host.is_open:
            self._open.append(host)

    def remove_host(self, name: str) -> None:
        """Forgets a host that runs nothing, or is dead."""
        state = self.hosts[name]
        assert not state.reservations, "what runs there would be lost from the books"
        self.mark_dead(name)
        del self.hosts[name]

    def place(self, request: Request, now_s: float) -> Placement | None:
        """Reserves a place; None if no host has room. Unless cancelled or confirmed it stays reserved."""
        best, least = None, math.inf
        rarity = self._rarity(request.image, now_s)
        for host in self._candidates(request):
            score = self._score(host, request, rarity, now_s)
            if score < least:
                best, least = host, score
        if best is None and request.only is None:
            for host in self._open:
                score = self._score(host, request, rarity, now_s)
                if score < least:
                    best, least = host, score
        if best is None:
            return None
        if request.image is not None:
            self.popularity.add(request.image, now_s)
        return self._reserve(best, request, now_s)

    def confirm(self, ticket: int, sandbox: str, now_s: float) -> None:
        """The sandbox runs (and its image has arrived). Raises SandboxMissingError if the host died."""
        reservation = self._reservations.get(ticket)
        if reservation is None:
            raise SandboxMissingError("no such reservation", field="ticket", received=ticket)
        reservation.sandbox, reservation.confirmed_s = sandbox, now_s
        self._by_sandbox[sandbox] = reservation
        fresh = reservation.host.fresh
        # Kept in order of confirmation, so that a report need only look at the front.
        fresh[ticket] = fresh.pop(ticket)
        if reservation.image is not None:
            self.image_ready(reservation.host.name, reservation.image, now_s)

    def cancel(self, ticket: int) -> None:
        """The sandbox was not made. Idempotent."""
        reservation = self._reservations.pop(ticket, None)
        if reservation is not None:
            reservation.host.free(reservation)

    def release(self, sandbox: str) -> None:
        """The sandbox has ended. Idempotent."""
        reservation = self._by_sandbox.pop(sandbox, None)
        if reservation is not None:
            self.cancel(reservation.ticket)

    def adopt(self, host: str, sandbox: str, demand: Demand, now_s: float) -> None:
        """Counts a sandbox that was found on a host, even on one that is full. Idempotent."""
        if sandbox not in self._by_sandbox:
            placement = self._reserve(self.hosts[host], Request(demand), now_s)
            self.confirm(placement.ticket, sandbox, now_s)

    def report(self, host: str, pressure: Pressure, measured_s: float) -> None:
        """The pressure of a host; sandboxes confirmed before `measured_s` are taken to be in it."""
        state = self.hosts[host]
        state.live = pressure
        seen: list[Reservation] = []
        waiting: list[Reservation] = []
        for reservation in state.fresh.values():
            if reservation.sandbox is None:
                waiting.append(reservation)
            elif reservation.confirmed_s <= measured_s:
                seen.append(reservation)
            else:
                break
        for reservation in seen:
            state.settle(reservation)
        self.use.learn(state)
        for reservation in waiting:
            # Those in flight go behind the confirmed ones.
            state.fresh[reservation.ticket] = state.fresh.pop(reservation.ticket)

    def image_ready(self, host: str, image: str, now_s: float) -> None:
        """An image is on a host, whole or far enough to start from it."""
        state = self.hosts[host]
        if state.images.get(image) == CACHED:
            return
        if image not in state.images:
            self._holders.setdefault(image, []).append(state)
        state.images[image] = CACHED
        state.end_fetch(image, now_s)

    def image_dropped(self, host: str, image: str, now_s: float) -> None:
        """An image was evicted from a host, or did not arrive. Idempotent."""
        state = self.hosts[host]
        if state.images.pop(image, None) is not None:
            state.end_fetch(image, now_s)
            self._drop_holder(state, image)

    def mark_dead(self, host: str) -> Lost:
        """The host is gone, and with it what ran or was being made there. Idempotent."""
        state = self.hosts[host]
        if not state.alive:
            return Lost((), ())
        state.alive = False
        self._close(state)
        for image in state.images:
            self._drop_holder(state, image)
        sandboxes: list[str] = []
        tickets: list[int] = []
        for ticket, reservation in state.reservations.items():
            del self._reservations[ticket]
            if reservation.sandbox is None:
                tickets.append(ticket)
            else:
                sandboxes.append(reservation.sandbox)
                del self._by_sandbox[reservation.sandbox]
        for rows in (state.reservations, state.fresh, state.images, state.fetching):
            rows.clear()
        return Lost(tuple(sandboxes), tuple(tickets))

    def reopen(self, host: str) -> None:
        """The host takes sandboxes again. Idempotent."""
        state = self.hosts[host]
        if state.retiring:
            state.retiring = False
            if state.alive:
                self._open.append(state)

    def retire(self, host: str) -> None:
        """No new sandboxes on the host; those there stay, and may be copied there. `reopen` opens it again.
        Idempotent."""
        state = self.hosts[host]
        state.retiring = True
        self._close(state)

    def place_fork(self, sandbox: str, count: int, now_s: float) -> list[Placement | None]:
        """Places for copies: on the sandbox's own host while there is room, then wherever they can migrate.

        Raises SandboxMissingError.
        """
        source = self._by_sandbox.get(sandbox)
        if source is None:
            raise SandboxMissingError("no such sandbox in the fleet", field="sandbox", received=sandbox)
        request = Request(source.demand, source.image, source.image_bytes)
        here = source.host
        places: list[Placement | None] = []
        for _ in range(count):
            if here.alive and here.pressure_with(request.demand) < math.inf:
                places.append(self._reserve(here, request, now_s))
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
        drawn = [self._open[int(uniform() * count)] for _ in range(self.policy.choices)]
        holders = self._holders.get(request.image) if request.image is not None else None
        if holders:
            if len(holders) <= self.policy.holder_choices:
                drawn += holders
            else:
                drawn += [self._draw(holders) for _ in range(self.policy.holder_choices)]
        return drawn

    def _draw(self, hosts: list[HostState]) -> HostState:
        return hosts[int(self._random.random() * len(hosts))]

    def _rarity(self, image: str | None, now_s: float) -> float:
        """1 for an image whose copies each served few requests; towards 0 the more popular it is."""
        copies = 0 if image is None else len(self._holders.get(image, ()))
        if image is None or copies == 0:
            return 1.0
        return min(1.0, self.policy.copy_serves * copies / (self.popularity.count(image, now_s) + 1))

    def _score(self, host: HostState, request: Request, rarity: float, now_s: float) -> float:
        if host.retiring and request.only != host.name:
            return math.inf
        if host.suspended_until_s > now_s or host.name in request.exclude:
            return math.inf
        score = host.pressure_with(request.demand)
        if host.suspected_until_s > now_s:
            score += _SUSPICION
        if request.image is not None:
            score += rarity * host.image_cost(request.image, request.image_bytes, now_s)
        return score

    def _reserve(self, host: HostState, request: Request, now_s: float) -> Placement:
        ticket = next(self._tickets)
        there = request.image is None or request.image in host.images
        if not there:
            assert request.image is not None
            self._fetch(host, request.image, request.image_bytes, now_s)
        reservation = Reservation(ticket, host, request.demand, request.image, request.image_bytes)
        self._reservations[ticket] = reservation
        host.reserve(reservation)
        return Placement(ticket, host.name, there)

    def _fetch(self, host: HostState, image: str, image_bytes: int, now_s: float) -> None:
        host.begin_fetch(image, image_bytes, now_s)
        self._holders.setdefault(image, []).append(host)

    def _drop_holder(self, host: HostState, image: str) -> None:
        holders = self._holders[image]
        holders.remove(host)
        if not holders:
            del self._holders[image]

    def _close(self, host: HostState) -> None:
        if host in self._open:
            self._open.remove(host)
