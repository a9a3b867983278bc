"""Inputs and results of a simulated burst of sandbox starts."""

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
    """Durations that are inputs of the simulation."""

    create: Latency = Latency(0.0044, 0.0078)
    """Time of one start on one core, as measured with the local backend (docs/sandbox.md)."""
    rpc: Latency = Latency(0.0005, 0.001)
    """One-way latency between control plane and host: assumed, typical of a data centre."""
    dispatch_s: float = 2e-5
    """Serial work of the control plane per start."""
    heartbeat_s: float = 1.0
    missed_heartbeats: int = 3


@dataclass(frozen=True, slots=True)
class Scenario:
    """One burst: all requests arrive at time 0, and no sandbox ends."""

    num_sandboxes: int = 100_000
    num_hosts: int = 125
    capacity: Capacity = field(default_factory=lambda: Capacity(64, 512 << 30, 4 << 40))
    demand: Resources = field(default_factory=lambda: Resources(memory_bytes=512 << 20))
    mean_use: float = 0.4
    """Mean fraction of its share of a host that a sandbox uses; exponentially distributed."""
    create_slots: int = 64
    """Sandboxes that one host starts concurrently."""
    death_fraction: float = 0.0
    """Fraction of the hosts (rounded up) that die at `death_at_s`."""
    death_at_s: float = math.inf
    latencies: Latencies = field(default_factory=Latencies)
    policy: Policy = field(default_factory=Policy)
    seed: int = 0
    limit_s: float = 7200.0
    """Virtual time after which the burst counts as stuck."""

    @property
    def num_deaths(self) -> int:
        """Number of hosts that die."""
        return math.ceil(self.num_hosts * self.death_fraction)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a burst. Times are virtual, except `scheduler_s`."""

    burst_s: float
    """Time until all sandboxes run."""
    start_p50_s: float
    """Time from the request (or from detecting the loss of a running sandbox) to running."""
    start_p99_s: float
    pressure_mean: float
    """Final mean over living hosts of each host's highest pressure."""
    pressure_spread: float
    """Maximum minus minimum of these, as a fraction of a host."""
    promised_spread: float
    """The same for promised memory."""
    lost: int
    """Sandboxes running or starting on hosts that died; all were requested again."""
    recover_s: float
    """Time from the deaths until all lost sandboxes ran again."""
    bounds_s: dict[str, float]
    """Resource -> lower bound of the burst's time by it alone."""
    num_placements: int
    scheduler_s: float
    """Real time of all scheduler decisions."""

    @property
    def bound(self) -> tuple[str, float]:
        """The limiting resource and its lower bound."""
        name = max(self.bounds_s, key=self.bounds_s.__getitem__)
        return name, self.bounds_s[name]
