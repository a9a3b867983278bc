"""Data types of the routing policy: requests, replicas and constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from etude.errors import SamplerError

_RATE_SHARE = 0.1
"""Weight of the newest answer in a replica's rate."""


class NoReplicaError(SamplerError):
    """No replica may take this request now: none is ready in its pool, or none serves its version."""

    retry_after_s = 1.0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The facts about a request that routing depends on."""

    id: str
    prompt_tokens: int
    """Length of the whole input, cached or not."""
    max_tokens: int
    session: str | None = None
    """Requests of one session share a growing prefix."""
    pool: str = "serve"
    versions: frozenset[str] | None = None
    """Names of the policy versions that may answer; None: any, or by A/B shares."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The policy's constants. Work is counted in sampled tokens (an input token is a fraction of one)."""

    prefill_weight: float = 0.05
    """Cost of computing one input token in sampled tokens: the ratio of both in an engine step."""
    spill_factor: float = 3.0
    """A session leaves its replica when that has this many times the work of the best other one, to which the
    cost of computing the session's prefix again is added."""
    spill_floor_tokens: float = 64.0
    """Also added to the other replica's work, so that sessions do not move under low load."""
    resident_weight: float = 0.02
    """Weight of the predicted work of a replica's sessions when a new session is placed."""
    expected_output_tokens: float = 60.0
    """Prior of the length of an answer."""
    expected_session_tokens: float = 600.0
    """Prior of the work of a session."""
    learn_rates: bool = True
    """Whether to weight the work of slower replicas more, by measured token rates. Needs wall time."""
    session_idle_s: float = 1800.0
    """Idle time after which a session is considered closed."""
    max_sessions: int = 100_000
    """Most sessions in the table; the least recently used are dropped first."""


class ReplicaState(StrEnum):
    """Health state of a replica."""

    JOINING = "joining"
    """Has not answered a probe yet, serves no named version, or is lent to a run."""
    READY = "ready"
    EJECTED = "ejected"
    DRAINING = "draining"
    """Gets no new requests; is removed when its last one ends."""


@dataclass(slots=True, eq=False)
class Replica:
    """A replica: its predicted work and its health."""

    name: str
    home: str
    """The pool that it belongs to."""
    pool: str
    """The pool that it works for now: differs from `home` while it is lent."""
    version: str | None = None
    """Name of the policy version that it serves; None until known."""
    by_hand: bool = False
    """Whether its pool was set by an administrator: no lending rule moves it."""
    running: int = 0
    """Requests in flight."""
    work: int = 0
    """Predicted remaining work of its requests in flight, in sampled tokens."""
    resident: int = 0
    """Predicted remaining work of its sessions, in sampled tokens."""
    sessions: set[str] = field(default_factory=set)
    rate: float | None = None
    """Moving average of tokens per second of an answer; None before the first."""
    state: ReplicaState = ReplicaState.READY
    failures: int = 0
    """Consecutive failures."""
    ejections: int = 0
    """Consecutive ejections, without a completely answered request in between."""
    next_probe_s: float = 0.0
    cause: str = ""
    """Cause of the last failure."""

    @property
    def ready(self) -> bool:
        """Whether it gets new requests."""
        return self.state is ReplicaState.READY

    def record_rate(self, tokens: int, elapsed_s: float) -> None:
        """Adds one answer to `rate`, unless no time has passed on the clock."""
        if tokens > 0 and elapsed_s > 0.0:
            rate = tokens / elapsed_s
            self.rate = rate if self.rate is None else self.rate + _RATE_SHARE * (rate - self.rate)
