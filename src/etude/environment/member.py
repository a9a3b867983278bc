"""One episode's view of the sampler, for callers that must know how far it has come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import numpy as np
from numpy.typing import NDArray

from etude.kit.tasks import closing
from etude.protocols import Sampler, TokenTally
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores


class MemberSampler(Sampler, TokenTally):
    """Implements Sampler and TokenTally for the sessions of one episode: attempts, which
    follow each other, and sessions that left another one in its middle, side by side.

    On a reproducible schedule the last session that is open stays open until `end`: the episode's grading is
    then one more thing that the schedule waits for at a fixed step, as if it were that session's last tool.
    """

    def __init__(
        self,
        sampler: Sampler,
        holds: bool,
        on_open: Callable[[str, MemberSampler], None] | None = None,
    ) -> None:
        """`holds`: whether closing the last open session is put off until `end`, or until another one is
        opened. `on_open`: called with every session that is opened."""
        self.num_tokens = 0
        """Tokens sampled so far, those of failed attempts included."""
        self.num_cached: int | None = None
        """Of the first request's input, tokens whose keys the sampler had already; None where it does not
        tell."""
        self.unnoted: set[str] = set()
        """Sessions that were opened, taken out by the code that notes their end."""
        self._sampler = sampler
        self._holds = holds
        self._on_open = on_open
        self._open: dict[str, None] = {}
        """Sessions that are open with the sampler, in the order of their opening."""
        self._put_off: str | None = None
        """The one of them that its driver has closed."""
        self._is_first = True

    def tally(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def open(self, session_id: str, beside: str | None = None) -> None:
        """See Sampler.open. A session that was opened ahead of its driver stays open."""
        if session_id in self._open:
            return
        if self._put_off is not None:
            self._close(self._put_off)
        self._sampler.open(session_id, beside)
        self._open[session_id] = None
        if self._on_open is not None:
            self._on_open(session_id, self)
            self.unnoted.add(session_id)

    def close(self, session_id: str) -> None:
        if self._holds and list(self._open) == [session_id]:
            self._put_off = session_id
        else:
            self._close(session_id)

    def end(self) -> None:
        """Closes what is open. Idempotent."""
        for session_id in tuple(self._open):
            self._close(session_id)

    def _close(self, session_id: str) -> None:
        if session_id in self._open:
            del self._open[session_id]
            self._put_off = None if self._put_off == session_id else self._put_off
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
