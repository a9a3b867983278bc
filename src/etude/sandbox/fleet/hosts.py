"""The nouns of placement: what a host has, how loaded it is, what a sandbox asks for, where it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from etude.errors import ConfigError
from etude.sandbox.types import Resources


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one host has."""

    cpus: float
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

    cpu: float
    memory: float
    disk: float

    @property
    def worst(self) -> float:
        """The resource that runs out first."""
        return max(self.cpu, self.memory, self.disk)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is promised to one sandbox."""

    cpus: float
    memory_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, resources: Resources) -> Demand:
        """What the limits of a sandbox promise it."""
        return cls(resources.cpus, resources.memory_bytes, resources.disk_bytes)


@dataclass(frozen=True, slots=True)
class Request:
    """A sandbox that wants a place."""

    demand: Demand
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
class Lost:
    """What went down with a host."""

    sandboxes: tuple[str, ...]
    tickets: tuple[int, ...]
    """Reservations of sandboxes that were just being made there."""


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


@dataclass(slots=True, eq=False)
class Use:
    """The part of its share that a sandbox uses, as the reports of all hosts show it: a moving average.

    Promises that no report has seen yet are weighed by it. At their full size a host would seem to empty
    with each of its reports, and all hosts would send their load to the one that reported last.
    """

    cpu: float = 1.0
    memory: float = 1.0
    disk: float = 1.0

    def learn(self, host: HostState) -> None:
        """Takes a report into account. Hosts that have hardly promised anything teach nothing."""
        cpu = (host.promised_cpus - host.fresh_cpus) * host.cpu_share
        memory = (host.promised_memory_bytes - host.fresh_memory_bytes) * host.memory_share
        disk = (host.promised_disk_bytes - host.fresh_disk_bytes) * host.disk_share
        self.cpu = _blend(self.cpu, host.live.cpu, cpu)
        self.memory = _blend(self.memory, host.live.memory, memory)
        self.disk = _blend(self.disk, host.live.disk, disk)


def _blend(before: float, live: float, promised: float) -> float:
    if promised < _LEAST_PROMISED:
        return before
    return before + _LEARNING_RATE * (min(1.0, max(_LEAST_USE, live / promised)) - before)


@dataclass(slots=True, eq=False)
class Reservation:
    """One promise of a host: in flight until confirmed, fresh until a later report covers it."""

    ticket: int
    host: HostState
    demand: Demand
    sandbox: str | None = None
    confirmed_s: float = math.inf


@dataclass(slots=True, eq=False)
class HostState:
    """What the scheduler knows of one host."""

    name: str
    capacity: Capacity
    policy: Policy
    use: Use = field(default_factory=Use)
    """Shared by all hosts of a scheduler."""
    live: Pressure = field(default_factory=lambda: Pressure(0.0, 0.0, 0.0))
    alive: bool = True
    retiring: bool = False
    """Takes nothing but what only it can serve: copies of its sandboxes, its snapshots."""
    suspended_until_s: float = -math.inf
    suspected_until_s: float = -math.inf
    promised_cpus: float = 0.0
    promised_memory_bytes: int = 0
    promised_disk_bytes: int = 0
    fresh_cpus: float = 0.0
    """Promises that the last report cannot have seen."""
    fresh_memory_bytes: int = 0
    fresh_disk_bytes: int = 0
    reservations: dict[int, Reservation] = field(default_factory=dict)
    fresh: dict[int, Reservation] = field(default_factory=dict)
    """Those among the reservations that the last report cannot have seen."""
    cpu_share: float = field(init=False)
    """Pressure of one promised core; likewise below, of one byte."""
    memory_share: float = field(init=False)
    disk_share: float = field(init=False)

    def __post_init__(self) -> None:
        self.resize(self.capacity)

    def resize(self, capacity: Capacity) -> None:
        """The host has become another size, or says what it has for the first time."""
        self.capacity = capacity
        self.cpu_share = 1 / (self.capacity.cpus * self.policy.cpu_overcommit)
        self.memory_share = 1 / (self.capacity.memory_bytes * self.policy.memory_overcommit)
        self.disk_share = 1 / (self.capacity.disk_bytes * self.policy.disk_overcommit)

    @property
    def is_open(self) -> bool:
        """Whether new sandboxes may come here, as far as nothing has failed."""
        return self.alive and not self.retiring

    def pressure_with(self, demand: Demand) -> float:
        """The worst pressure if `demand` came on top; infinite if it does not fit."""
        cpus, memory, disk = demand.cpus, demand.memory_bytes, demand.disk_bytes
        promised_cpu = (self.promised_cpus + cpus) * self.cpu_share
        promised_memory = (self.promised_memory_bytes + memory) * self.memory_share
        promised_disk = (self.promised_disk_bytes + disk) * self.disk_share
        if max(promised_memory, promised_disk) > _FULL:
            return math.inf
        if promised_cpu > self.policy.max_cpu_pressure + _ROUNDING:
            return math.inf
        live, use = self.live, self.use
        busy = live.cpu + (self.fresh_cpus + cpus) * self.cpu_share * use.cpu
        full = max(
            live.memory + (self.fresh_memory_bytes + memory) * self.memory_share * use.memory,
            live.disk + (self.fresh_disk_bytes + disk) * self.disk_share * use.disk,
        )
        if full > self.policy.max_pressure + _ROUNDING or busy > self.policy.max_cpu_pressure + _ROUNDING:
            return math.inf
        usual = max(promised_cpu * use.cpu, promised_memory * use.memory, promised_disk * use.disk)
        return max(busy, full, usual * self.policy.floor)

    def reserve(self, reservation: Reservation) -> None:
        """Counts a new promise."""
        demand = reservation.demand
        self.reservations[reservation.ticket] = reservation
        self.promised_cpus += demand.cpus
        self.promised_memory_bytes += demand.memory_bytes
        self.promised_disk_bytes += demand.disk_bytes
        self.fresh[reservation.ticket] = reservation
        self.fresh_cpus += demand.cpus
        self.fresh_memory_bytes += demand.memory_bytes
        self.fresh_disk_bytes += demand.disk_bytes

    def free(self, reservation: Reservation) -> None:
        """Takes a promise back."""
        demand = reservation.demand
        del self.reservations[reservation.ticket]
        self.promised_cpus -= demand.cpus
        self.promised_memory_bytes -= demand.memory_bytes
        self.promised_disk_bytes -= demand.disk_bytes
        self.settle(reservation)
        if not self.reservations:
            # Fractions of cores do not add up exactly: an empty host is empty.
            self.promised_cpus = 0.0

    def settle(self, reservation: Reservation) -> None:
        """A report has seen it: it is no longer counted on top of what is measured."""
        if self.fresh.pop(reservation.ticket, None) is None:
            return
        self.fresh_cpus -= reservation.demand.cpus
        self.fresh_memory_bytes -= reservation.demand.memory_bytes
        self.fresh_disk_bytes -= reservation.demand.disk_bytes
        if not self.fresh:
            self.fresh_cpus = 0.0


_LEARNING_RATE = 0.05
_LEAST_PROMISED = 0.05
_LEAST_USE = 0.05
_ROUNDING = 1e-9
_FULL = 1.0 + _ROUNDING
"""A host is full when it has promised all it has; the rounding of sums must not refuse the last one."""
