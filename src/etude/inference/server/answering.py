"""Sampling one answer: parameters, sampled chunks, and the events that are served to the client.

The engine finds cached prefixes by their tokens, so each answer has its own session, which is sent the whole
prompt and is closed with the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.kit.tasks import closing
from etude.protocols import Sampler
from etude.records import SampleChunk, SampleRequest, SamplingParams
from etude.tokens.chat.answers import Ended, Ending, Event, Sampled
from etude.tokens.chat.reader import TextReader, cut_chunk

Tokens = NDArray[np.int32]
_SESSIONS = map("serve-{}-{}".format, itertools.repeat(secrets.token_hex(4)), itertools.count())
"""Unique session names of this process."""


@dataclass(slots=True, eq=False)
class Job:
    """One answer of a request."""

    index: int
    """Index among the answers of its request."""
    prompt: Tokens
    params: SamplingParams
    stop_tokens: frozenset[int]
    rng_key: tuple[int, ...]
    reader: TextReader
    on_complete: Callable[[Tokens], None] = lambda tokens: None
    """Called with the tokens of the whole answer."""
    chunks: list[SampleChunk] = field(default_factory=list[SampleChunk])
    """Chunks sampled so far."""
    num_tokens: int = 0
    """Tokens in `chunks`."""
    last_s: float = 0.0
    """Time at which the last chunk came."""
    ended: Ended | None = None
    """The final event, once the answer is complete."""

    @property
    def outstanding_tokens(self) -> int:
        """Upper bound of the tokens yet to be computed: the prompt before the first token, and the answer."""
        if self.ended is not None:
            return 0
        return self.params.max_tokens - self.num_tokens + (0 if self.num_tokens else len(self.prompt))

    async def sample(
        self, sampler: Sampler, pool: str, within_s: float, emit: Callable[[Event], None]
    ) -> None:
        """Samples to the end and emits events, an `Ended` last. Raises SamplerError, or as the sampler."""
        session_id = next(_SESSIONS)
        sampler.open(session_id)
        is_finished = False
        try:
            async with asyncio.timeout(within_s):
                async with closing(sampler.stream(self._request(session_id, pool))) as chunks:
                    async for chunk in chunks:
                        is_finished = chunk.finish is not None
                        emit(self._add_chunk(chunk))
                        if self.ended is not None:
                            break
        except TimeoutError:
            raise SamplerError("the answer took too long", received=f"{within_s:g} s") from None
        finally:
            if not is_finished:
                sampler.abort(session_id)
            sampler.close(session_id)
        if self.ended is None:
            raise SamplerError("the request ended before the answer did", field="chunk.finish")
        emit(self.ended)

    def _request(self, session_id: str, pool: str) -> SampleRequest:
        return SampleRequest(
            id=session_id,
            session_id=session_id,
            suffix=self.prompt,
            params=self.params,
            stop_tokens=self.stop_tokens,
            rng_key=self.rng_key,
            pool=pool,
            streaming=True,
        )

    def _add_chunk(self, chunk: SampleChunk) -> Sampled:
        """Adds a chunk; returns what it adds to the served answer. Raises SamplerError."""
        if chunk.finish == "abort":
            raise SamplerError("the request was aborted from outside", field="chunk.finish")
        reader, is_first = self.reader, not self.chunks
        parts, count = reader.feed(chunk.tokens)
        is_last = chunk.finish is not None or reader.ended
        if is_last:
            parts = [*parts, *reader.finish()]
        if count < len(chunk.tokens) or (reader.ended and chunk.finish is None):
            chunk = cut_chunk(chunk, count, len(self.prompt) + self.num_tokens)
        self.chunks.append(chunk)
        self.num_tokens += count
        if is_last:
            self.on_complete(np.concatenate([earlier.tokens for earlier in self.chunks]))
            self.ended = Ended(self._ending(chunk), self.num_tokens, reader.stop, self.index)
        return Sampled(parts, chunk, self.index, (chunk.cached_tokens or 0) if is_first else 0)

    def _ending(self, last: SampleChunk) -> Ending:
        if last.finish == "length" and not self.reader.ended:
            return "length"
        return "calls" if self.reader.answer.calls and self.reader.stop is None else "stop"


def random_key() -> int:
    """A random seed, for requests without one."""
    return secrets.randbits(62)
