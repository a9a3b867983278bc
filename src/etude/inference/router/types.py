"""What the routing policy gets and what it decides. No I/O anywhere in here."""

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
class Ask:
    """One request, as far as routing needs to know it."""

    id: str
    prompt_tokens: int
    """The whole input, whatever may be cached of it."""
    max_tokens: int
    session: str | None = None
    """Requests of one session share a growing prefix."""
    pool: str = "serve"
    versions: frozenset[str] | None = None
    """Names of the policy versions that may answer; None: any, or what A/B shares say."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The policy's constants. Work is counted in sampled tokens (an input token is a fraction of one)."""

    prefill_weight: float = 0.05
    """Cost of computing one input token in sampled tokens: the ratio of both in an engine step."""
    spill_factor: float = 3.0
    """A session leaves its replica when that has so many times the work of the best other one, the price of
    computing the session's prefix anew counted as work of the other."""
    spill_floor_tokens: float = 64.0
    """Added to the other side: with little to do anywhere nothing moves."""
    resident_weight: float = 0.02
    """Share of the predicted rest of sessions that live on a replica, counted when a new one is placed."""
    expected_output_tokens: float = 60.0
    """Of one answer, until some have been seen."""
    expected_session_tokens: float = 600.0
    """Work of one session, until some have been seen."""
    learn_rates: bool = True
    """Count work for more on replicas whose answers come slower. Off where the clock is not wall time."""
    session_idle_s: float = 1800.0
    """A session without a request for so long is taken for ended."""
    max_sessions: int = 100_000
    """Sessions that are remembered; the oldest are forgotten first."""


class ReplicaState(StrEnum):
    """Where a replica stands."""

    JOINING = "joining"
    """Never answered yet, or serves no named version."""
    READY = "ready"
    EJECTED = "ejected"
    DRAINING = "draining"
    """Takes nothing new; gone when its last request ends."""


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: its work, as the policy sees it, and its health."""

    name: str
    home: str
    """The pool that it belongs to."""
    pool: str
    """The pool that it works for now: another than `home` while it is lent."""
    version: str | None = None
    """Name of the policy version that it serves; None until it has said."""
    by_hand: bool = False
    """Somebody has decided which pool it works for: no rule of lending moves it."""
    ready: bool = True
    """False: ejected, draining, lent to a run, or without a version. Nothing new goes there."""
    running: int = 0
    """Requests in flight."""
    work: int = 0
    """Predicted rest of the requests in flight, in sampled tokens."""
    resident: int = 0
    """Predicted rest of the sessions that live here, in sampled tokens."""
    sessions: set[str] = field(default_factory=set)
    rate: float | None = None
    """Tokens per second that its answers have lately got, each by itself; None: nothing seen yet."""
    state: ReplicaState = ReplicaState.JOINING
    failures: int = 0
    """In a row."""
    ejections: int = 0
    """In a row: how often it failed again without having been ready for a request in between."""
    next_probe_s: float = 0.0
    cause: str = ""
    """Of the last failure."""

    def note_rate(self, tokens: int, elapsed_s: float) -> None:
        """Counts one answer in. Where the clock stands still there is nothing to learn."""
        if tokens > 0 and elapsed_s > 0.0:
            rate = tokens / elapsed_s
            self.rate = rate if self.rate is None else self.rate + _RATE_SHARE * (rate - self.rate)
