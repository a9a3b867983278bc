"""The nouns of placement: what a host has, how loaded it is, what a sandbox asks for, where it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from etude.errors import ConfigError
from etude.sandbox.types import Resources

Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A comparison with NaN is false: no host may look empty for it."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one host has."""

    cpus: Measured
    memory_bytes: int
    disk_bytes: int

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "disk_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    "a host has some of everything",
                    field=f"capacity.{name}",
                    received=getattr(self, name),
                    fix="give a number above zero",
                )


NO_CAPACITY = Capacity(1e-9, 1, 1)
"""Of a host that has not said yet what it has: nothing fits."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Measured use of one host as fractions of what it has; above 1 when work waits for a resource."""

    cpu: Measured
    memory: Measured
    disk: Measured


@dataclass(frozen=True, slots=True)
class Request:
    """A sandbox that wants a place."""

    demand: Resources
    exclude: frozenset[str] = frozenset()
    """Hosts that failed it already."""
    only: str | None = None
    """The one host that can serve it: the one that holds its snapshot."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A reservation on a host: to be confirmed with the sandbox's id, or cancelled."""

    ticket: int
    host: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's constants. All pressures are fractions of a host."""

    choices: int = 4
    """Hosts drawn at random for each placement. Two already take the imbalance from log n to log log n
    (Mitzenmacher 2001); four also forgive reports that are a second old."""
    cpu_overcommit: float = 16.0
    """Promised cores per core: an agent's sandbox waits for the model most of the time."""
    memory_overcommit: float = 1.0
    disk_overcommit: float = 1.0
    max_pressure: float = 1.0
    """Measured and reserved pressure beyond which a host takes nothing more."""
    max_cpu_pressure: float = 1.0
    """The same for its processor, what it has promised included: without bound, where slow will do."""
    floor: float = 0.5
    """A host never counts as emptier than this part of what its promises come to on average: sandboxes
    that have just started use little at the moment of the report."""


def _amounts(of: Capacity | Resources) -> tuple[float, float, float]:
    """Cores, bytes of memory and bytes of disk: whatever has three numbers below has them in this order."""
    return of.cpus, of.memory_bytes, of.disk_bytes


@dataclass(slots=True, eq=False)
class Reservation:
    """One promise of a host: in flight until confirmed, fresh until a later report covers it."""

    ticket: int
    host: HostState
    demand: Resources
    sandbox: str | None = None
    confirmed_s: float = math.inf


@dataclass(slots=True, eq=False)
class HostState:
    """What the scheduler knows of one host."""

    name: str
    capacity: Capacity
    policy: Policy
    use: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    """The part of its share that a sandbox uses, as the reports of all hosts show it: a moving average that
    all hosts of a scheduler share. Promises that no report has seen yet are weighed by it. At their full
    size a host would seem to empty with each of its reports, and all hosts would send their load to the one
    that reported last."""
    live: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The last report: fractions of the host."""
    alive: bool = True
    retiring: bool = False
    """Takes nothing but what only it can serve: copies of its sandboxes, its snapshots."""
    suspected_until_s: float = -math.inf
    """Until then it is the last to be asked."""
    promised: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    promised_fresh: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Promises that the last report cannot have seen."""
    reservations: dict[int, Reservation] = field(default_factory=dict)
    fresh: dict[int, Reservation] = field(default_factory=dict)
    """Those among the reservations that the last report cannot have seen."""
    shares: tuple[float, ...] = field(init=False)
    """Pressure of one promised core, of one byte of memory and of one of disk."""

    def __post_init__(self) -> None:
        self.resize(self.capacity)

    def resize(self, capacity: Capacity) -> None:
        """The host has become another size, or says what it has for the first time."""
        self.capacity = capacity
        overcommit = self.policy.cpu_overcommit, self.policy.memory_overcommit, self.policy.disk_overcommit
        self.shares = tuple(
            1 / (size * factor) for size, factor in zip(_amounts(capacity), overcommit, strict=True)
        )

    @property
    def is_open(self) -> bool:
        """Whether new sandboxes may come here, as far as nothing has failed."""
        return self.alive and not self.retiring

    def pressure_with(self, demand: Resources) -> float:
        """The worst pressure if `demand` came on top; infinite if it does not fit."""
        policy = self.policy
        # A host is full when it has promised all it has; the rounding of sums must not refuse the last one.
        most_promised = policy.max_cpu_pressure + _ROUNDING, 1.0 + _ROUNDING, 1.0 + _ROUNDING
        most_used = most_promised[0], policy.max_pressure + _ROUNDING, policy.max_pressure + _ROUNDING
        worst = 0.0
        for axis, wanted in enumerate(_amounts(demand)):
            share, use = self.shares[axis], self.use[axis]
            promised = (self.promised[axis] + wanted) * share
            used = self.live[axis] + (self.promised_fresh[axis] + wanted) * share * use
            if promised > most_promised[axis] or used > most_used[axis]:
                return math.inf
            worst = max(worst, used, promised * use * policy.floor)
        return worst

    def reserve(self, reservation: Reservation) -> None:
        """Counts a new promise."""
        self.reservations[reservation.ticket] = self.fresh[reservation.ticket] = reservation
        _add(self.promised, reservation.demand, 1)
        _add(self.promised_fresh, reservation.demand, 1)

    def free(self, reservation: Reservation) -> None:
        """Takes a promise back."""
        del self.reservations[reservation.ticket]
        _add(self.promised, reservation.demand, -1)
        self._settle(reservation)
        if not self.reservations:
            # Fractions of cores do not add up exactly: an empty host is empty.
            self.promised[:] = 0.0, 0.0, 0.0

    def report(self, pressure: Pressure, measured_s: float) -> None:
        """The pressure; what was confirmed before `measured_s` is taken to be in it."""
        self.live = pressure.cpu, pressure.memory, pressure.disk
        for reservation in list(self.fresh.values()):
            if reservation.confirmed_s <= measured_s:
                self._settle(reservation)
        for axis, live in enumerate(self.live):
            promised = (self.promised[axis] - self.promised_fresh[axis]) * self.shares[axis]
            if promised >= _LEAST_PROMISED:  # hosts that have hardly promised anything teach nothing
                seen = min(1.0, max(_LEAST_USE, live / promised))
                self.use[axis] += _LEARNING_RATE * (seen - self.use[axis])

    def _settle(self, reservation: Reservation) -> None:
        """A report has seen it: it is no longer counted on top of what is measured."""
        if self.fresh.pop(reservation.ticket, None) is not None:
            _add(self.promised_fresh, reservation.demand, -1)
        if not self.fresh:
            self.promised_fresh[:] = 0.0, 0.0, 0.0


def _add(sums: list[float], demand: Resources, sign: int) -> None:
    for axis, amount in enumerate(_amounts(demand)):
        sums[axis] += sign * amount


_LEARNING_RATE = 0.05
_LEAST_PROMISED = 0.05
_LEAST_USE = 0.05
_ROUNDING = 1e-9
