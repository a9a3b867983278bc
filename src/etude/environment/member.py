"""One episode's view of the sampler, which counts its tokens and tracks its open sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import numpy as np
from numpy.typing import NDArray

from etude.kit.tasks import closing
from etude.protocols import Sampler, TokenProgress
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores


class MemberSampler(Sampler, TokenProgress):
    """Implements Sampler and TokenProgress for the sessions of one episode: attempts, one after the other, or
    siblings of a fork, side by side.

    On a reproducible schedule the last session stays open until `end`, so that the schedule waits for the
    episode's grading at a fixed step, as if it were that session's last tool.
    """

    def __init__(
        self,
        sampler: Sampler,
        defers_close: bool,
        on_open: Callable[[str, MemberSampler], None] | None = None,
    ) -> None:
        """`defers_close`: whether closing the last open session waits for `end`, or until another one is
        opened. `on_open`: called with every session that is opened."""
        self.num_tokens = 0
        """Tokens sampled so far, those of failed attempts included."""
        self.num_cached: int | None = None
        """Cached tokens of the first request's input; None where the sampler does not report them."""
        self.unrecorded_ends: set[str] = set()
        """Sessions that were opened; `PacedEpisodes` removes each when the schedule has recorded its end."""
        self._sampler = sampler
        self._defers_close = defers_close
        self._on_open = on_open
        self._open: dict[str, None] = {}
        """Sessions that are open in the sampler, in the order of opening."""
        self._deferred: str | None = None
        """The one of them whose close is deferred."""
        self._is_first = True

    def report_tokens(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open. Nothing happens if the session was opened before its driver did."""
        if session_id in self._open:
            return
        if self._deferred is not None:
            self._close(self._deferred)
        self._sampler.open(session_id, sibling)
        self._open[session_id] = None
        if self._on_open is not None:
            self._on_open(session_id, self)
            self.unrecorded_ends.add(session_id)

    def close(self, session_id: str) -> None:
        if self._defers_close and list(self._open) == [session_id]:
            self._deferred = session_id
        else:
            self._close(session_id)

    def end(self) -> None:
        """Closes what is open. Idempotent."""
        for session_id in tuple(self._open):
            self._close(session_id)

    def _close(self, session_id: str) -> None:
        if session_id in self._open:
            del self._open[session_id]
            self._deferred = None if self._deferred == session_id else self._deferred
            self._sampler.close(session_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        async with closing(self._sampler.stream(request)) as chunks:
            async for chunk in chunks:
                if self._is_first:
                    self._is_first, self.num_cached = False, chunk.cached_tokens
                self.num_tokens += len(chunk.tokens)
                yield chunk

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        return await self._sampler.score(tokens, version)

    def abort(self, request_id: str) -> None:
        self._sampler.abort(request_id)
