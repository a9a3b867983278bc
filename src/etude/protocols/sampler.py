"""Interface between rollouts and what samples tokens: our engine, vLLM, or a router over replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores


class Sampler(Protocol):
    """Continues sessions, token by token.

    A session is opened before its first request and closed after its last; between requests the
    sampler may keep the session's keys and values. One request of a session is in flight at a time.
    """

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """Announces a session, so that a deterministic schedule can wait for its first request.

        `sibling`: an open session with which it shares its first tokens. It should run on the replica of that
        session; and on a deterministic schedule its first request is waited for at the same step as that
        session's next one, whenever this is called.
        """
        ...

    def close(self, session_id: str) -> None:
        """Ends a session and frees its keys and values. Unknown ids are ignored."""
        ...

    def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """Yields chunks until one has `finish` set.

        Raises PrefixMissError if the named prefix is no longer held, SamplerError if the engine fails.
        """
        ...

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """Log-probabilities of `tokens` [T] at temperature 1 under exactly `version`."""
        ...

    def abort(self, request_id: str) -> None:
        """Stops one request; its stream ends with finish `abort`. Unknown ids are ignored."""
        ...


class Pace(Protocol):
    """Callbacks between two steps of a sampler's reproducible schedule: what they do is reproducible, too."""

    def on_session_ended(self, session_id: str) -> None:
        """A session was closed, and the schedule has reached the step at which its end counts."""
        ...

    async def before_next_step(self) -> None:
        """Called after `on_session_ended` for one or more sessions; no step is taken until this returns."""
        ...

    def on_schedule_ended(self) -> None:
        """The sampler failed or stopped: there are no further calls."""
        ...


@runtime_checkable
class PacedSampler(Sampler, Protocol):
    """A sampler that may have a reproducible schedule."""

    def set_pace(self, pace: Pace | None) -> bool:
        """Calls `pace` from now on if there is a reproducible schedule; returns whether there is."""
        ...
