"""Data types of placement: capacity and pressure of hosts, requests, reservations, the scheduler's policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from etude.errors import ConfigError
from etude.sandbox.types import Resources

Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Never NaN: comparisons with it are false, so that the host would count as empty."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The resources of one host."""

    cpus: Measured
    memory_bytes: int
    disk_bytes: int

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "disk_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    "the capacity of a host must be above zero",
                    field=f"capacity.{name}",
                    received=getattr(self, name),
                    fix="set a number above zero",
                )


NO_CAPACITY = Capacity(1e-9, 1, 1)
"""Placeholder for a host whose capacity is not known yet: nothing fits."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Measured use of one host as fractions of what it has; above 1 when work waits for a resource."""

    cpu: Measured
    memory: Measured
    disk: Measured


@dataclass(frozen=True, slots=True)
class Request:
    """A request to place one sandbox."""

    demand: Resources
    exclude: frozenset[str] = frozenset()
    """Hosts that have failed this request."""
    only: str | None = None
    """The only host that can serve it, because it holds the snapshot; None: any."""


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
    """Measured plus reserved pressure beyond which a host accepts nothing more."""
    max_cpu_pressure: float = 1.0
    """The same for the processor, and for what is promised of it. Infinite: slow sandboxes are acceptable."""
    floor: float = 0.5
    """Lower bound of a host's pressure, as a fraction of its promises at average utilization: sandboxes that
    have just started use little at the moment of the report."""


def _amounts(of: Capacity | Resources) -> tuple[float, float, float]:
    """Cores, bytes of memory and bytes of disk: the order of all triples below."""
    return of.cpus, of.memory_bytes, of.disk_bytes


@dataclass(slots=True, eq=False)
class Reservation:
    """Resources promised on a host: in flight until confirmed, fresh until a later report covers them."""

    ticket: int
    host: HostState
    demand: Resources
    sandbox: str | None = None
    confirmed_s: float = math.inf


@dataclass(slots=True, eq=False)
class HostState:
    """The scheduler's record of one host."""

    name: str
    capacity: Capacity
    policy: Policy
    utilization: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    """Average utilization: the fraction of its promise that a sandbox uses, by resource. A moving average
    over the reports of all hosts, shared by all hosts of a scheduler. Promises that no report covers yet are
    weighted by it: at full size they would make each report lower the host's pressure, and the host that
    reported last would attract all load."""
    measured: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The last report: measured use as fractions of the capacity."""
    alive: bool = True
    retiring: bool = False
    """Accepts only what no other host can serve: forks of its sandboxes, its snapshots."""
    suspected_until_s: float = -math.inf
    """Until this time it is chosen only if no other host has room."""
    promised: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    promised_fresh: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """The part of `promised` that the last report does not cover."""
    reservations: dict[int, Reservation] = field(default_factory=dict)
    fresh: dict[int, Reservation] = field(default_factory=dict)
    """The reservations that the last report does not cover."""
    shares: tuple[float, ...] = field(init=False)
    """Pressure of one promised core, of one byte of memory and of one of disk."""

    def __post_init__(self) -> None:
        self.resize(self.capacity)

    def resize(self, capacity: Capacity) -> None:
        """Sets the capacity, at the first report of it or when it changes."""
        self.capacity = capacity
        overcommit = self.policy.cpu_overcommit, self.policy.memory_overcommit, self.policy.disk_overcommit
        self.shares = tuple(
            1 / (size * factor) for size, factor in zip(_amounts(capacity), overcommit, strict=True)
        )

    @property
    def is_open(self) -> bool:
        """Whether the host accepts new sandboxes, if it has room."""
        return self.alive and not self.retiring

    def pressure_with(self, demand: Resources) -> float:
        """The highest of the three pressures with `demand` added; infinite if it does not fit."""
        policy = self.policy
        # A host is full when it has promised all it has; the rounding of sums must not refuse the last one.
        most_promised = policy.max_cpu_pressure + _ROUNDING, 1.0 + _ROUNDING, 1.0 + _ROUNDING
        most_used = most_promised[0], policy.max_pressure + _ROUNDING, policy.max_pressure + _ROUNDING
        worst = 0.0
        for axis, wanted in enumerate(_amounts(demand)):
            share, use = self.shares[axis], self.utilization[axis]
            promised = (self.promised[axis] + wanted) * share
            used = self.measured[axis] + (self.promised_fresh[axis] + wanted) * share * use
            if promised > most_promised[axis] or used > most_used[axis]:
                return math.inf
            worst = max(worst, used, promised * use * policy.floor)
        return worst

    def reserve(self, reservation: Reservation) -> None:
        """Adds a reservation to the promises."""
        self.reservations[reservation.ticket] = self.fresh[reservation.ticket] = reservation
        _add(self.promised, reservation.demand, 1)
        _add(self.promised_fresh, reservation.demand, 1)

    def free(self, reservation: Reservation) -> None:
        """Removes a reservation from the promises."""
        del self.reservations[reservation.ticket]
        _add(self.promised, reservation.demand, -1)
        self._mark_measured(reservation)
        if not self.reservations:
            # Fractions of cores do not add up exactly: an empty host is empty.
            self.promised[:] = 0.0, 0.0, 0.0

    def report(self, pressure: Pressure, measured_s: float) -> None:
        """Records a measurement; reservations confirmed before `measured_s` count as included in it."""
        self.measured = pressure.cpu, pressure.memory, pressure.disk
        for reservation in list(self.fresh.values()):
            if reservation.confirmed_s <= measured_s:
                self._mark_measured(reservation)
        for axis, measured in enumerate(self.measured):
            promised = (self.promised[axis] - self.promised_fresh[axis]) * self.shares[axis]
            if promised >= _LEAST_PROMISED:  # too little is promised for an estimate
                seen = min(1.0, max(_LEAST_USE, measured / promised))
                self.utilization[axis] += _LEARNING_RATE * (seen - self.utilization[axis])

    def _mark_measured(self, reservation: Reservation) -> None:
        """Marks a reservation as covered by a report: it no longer counts on top of the measurement."""
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
