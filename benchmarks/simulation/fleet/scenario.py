"""What a simulated burst is given, and what it tells."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from etude.sandbox.fleet.hosts import Capacity, Policy
from etude.sandbox.types import Resources

_Z90 = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Latency:
    """A lognormal duration by two measured quantiles."""

    p50_s: float
    p90_s: float

    def sample(self, source: random.Random) -> float:
        """One duration in seconds."""
        return self.p50_s * math.exp(self._sigma * source.gauss(0.0, 1.0))

    @property
    def mean_s(self) -> float:
        """Its expectation in seconds."""
        return self.p50_s * math.exp(self._sigma**2 / 2)

    @property
    def _sigma(self) -> float:
        return math.log(self.p90_s / self.p50_s) / _Z90


@dataclass(frozen=True, slots=True)
class Latencies:
    """Durations that the simulation takes as given."""

    create: Latency = Latency(0.0044, 0.0078)
    """Of one start, on one core: measured on the local backend (docs/sandbox.md)."""
    rpc: Latency = Latency(0.0005, 0.001)
    """One way between the control plane and a host: assumed, a data centre's usual."""
    dispatch_s: float = 2e-5
    """Work of the control plane for each start, one after the other."""
    heartbeat_s: float = 1.0
    missed_heartbeats: int = 3


@dataclass(frozen=True, slots=True)
class Scenario:
    """One burst: all requests at time 0, none ends."""

    num_sandboxes: int = 100_000
    num_hosts: int = 125
    capacity: Capacity = field(default_factory=lambda: Capacity(64, 512 << 30, 4 << 40))
    demand: Resources = field(default_factory=lambda: Resources(memory_bytes=512 << 20))
    mean_use: float = 0.4
    """Part of its share of a host that a sandbox uses on average; each draws its own (exponential)."""
    create_slots: int = 64
    """Sandboxes that one host starts at once."""
    death_fraction: float = 0.0
    """Part of the hosts (rounded up) that dies at `death_at_s`."""
    death_at_s: float = math.inf
    latencies: Latencies = field(default_factory=Latencies)
    policy: Policy = field(default_factory=Policy)
    seed: int = 0
    limit_s: float = 7200.0
    """Virtual time after which the burst counts as stuck."""

    @property
    def num_deaths(self) -> int:
        """Hosts that die."""
        return math.ceil(self.num_hosts * self.death_fraction)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a burst. Times are virtual, except `scheduler_s`."""

    burst_s: float
    """Until all sandboxes ran at once."""
    start_p50_s: float
    """From the request (or the loss of a running sandbox being noticed) to running."""
    start_p99_s: float
    pressure_mean: float
    """Of the living hosts' worst pressures, at the end."""
    pressure_spread: float
    """Their maximum less their minimum, as a fraction of a host."""
    promised_spread: float
    """The same of what was promised."""
    lost: int
    """Sandboxes that ran or were being started on hosts that died; all were asked for again."""
    recover_s: float
    """From the deaths until all that was lost then ran again."""
    bounds_s: dict[str, float]
    """The least time by each resource alone."""
    num_placements: int
    scheduler_s: float
    """Real time that the scheduler took for all its decisions."""

    @property
    def bound(self) -> tuple[str, float]:
        """The resource that limits, and the least time by it."""
        name = max(self.bounds_s, key=self.bounds_s.__getitem__)
        return name, self.bounds_s[name]
