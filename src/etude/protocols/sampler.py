"""The seam between rollouts and whatever samples tokens: our engine, vLLM, a router over replicas."""

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

    def open(self, session_id: str, beside: str | None = None) -> None:
        """Announces a session, so that a deterministic schedule can wait for its first request.

        `beside`: a session with tokens of which it begins, and which is still open. It should start in the
        place where that one is; and on a deterministic schedule its first request is waited for at the step
        at which that one's next is, whenever this is called.
        """
        ...

    def close(self, session_id: str) -> None:
        """Ends a session and frees what is held for it. Unknown ids are ignored."""
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
    """Acts between two steps of a sampler's reproducible schedule, so that what it does repeats."""

    def ended(self, session_id: str) -> None:
        """A session was closed, and the schedule has come to the step at which it takes note of that."""
        ...

    async def turn(self) -> None:
        """Some sessions have ended: no step is taken until this returns."""
        ...

    def stopped(self) -> None:
        """The schedule has come to its end: nothing more will come."""
        ...


@runtime_checkable
class PacedSampler(Sampler, Protocol):
    """A sampler that may have such a schedule."""

    def set_pace(self, pace: Pace | None) -> bool:
        """Tells `pace` from now on; whether there is a reproducible schedule to tell of."""
        ...
