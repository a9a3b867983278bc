"""Samples the answers to one request: `n` of them at the same time, their events merged as they come.

    jobs --a task each--> sampler.stream() --chunks--> reader --> Sampled ..... Ended
                                                                      \\____ one queue ____ events()

Whoever stops listening ends all of it: the requests are aborted, and their sessions closed.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.errors import PrefixMissError, SamplerError
from etude.inference.server.leases import Lease, Leases
from etude.kit.tasks import end_tasks
from etude.protocols import Sampler
from etude.records import SampleChunk, SampleRequest, SamplingParams
from etude.tokens.chat.answers import Ended, Ending, Event, Sampled
from etude.tokens.chat.messages import Answer
from etude.tokens.chat.reader import Part, cut_chunk

Tokens = NDArray[np.int32]


class Reader(Protocol):
    """Reads one answer."""

    ended: bool
    """A stop string has come: no more tokens are wanted."""
    stop: str | None
    """It."""

    @property
    def answer(self) -> Answer:
        """What was served so far."""
        ...

    def feed(self, tokens: NDArray[np.int32]) -> tuple[Sequence[Part], int]:
        """What these tokens add, and how many of them belong to the answer."""
        ...

    def finish(self) -> Sequence[Part]:
        """What was held back."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One answer that is wanted."""

    index: int
    """Its place among the answers of its request."""
    prompt: Tokens
    params: SamplingParams
    stop_tokens: frozenset[int]
    rng_key: tuple[int, ...]
    reader: Reader
    conversation: str | None = None
    remember: Callable[[Tokens], None] = lambda tokens: None
    """Called with the tokens of the whole answer."""


@dataclass(slots=True, eq=False)
class Answering:
    """What it takes to sample for a server."""

    sampler: Sampler
    leases: Leases
    pool: str = "serve"
    answer_s: float = 900.0
    """Longest time of one answer."""

    async def events(self, jobs: Sequence[Job]) -> AsyncGenerator[Event]:
        """Yields what is sampled; an `Ended` for each job. Closing it early aborts what is left.

        Raises InfrastructureError where the sampler fails: then no answer comes.
        """
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(self._answer(job, queue)) for job in jobs]
        try:
            left = len(jobs)
            while left:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                left -= isinstance(event, Ended)
                yield event
        finally:
            await end_tasks(*tasks)

    async def _answer(self, job: Job, queue: asyncio.Queue[Event | BaseException]) -> None:
        """Samples one answer to its end; the queue always gets a last word, but of a cancelled one."""
        try:
            lease = self.leases.take(job.conversation)
        except Exception as error:
            queue.put_nowait(error)
            return
        running = _Running(job, lease, queue)
        try:
            async with asyncio.timeout(self.answer_s):
                await self._send(running)
        except TimeoutError:
            queue.put_nowait(SamplerError("the answer took too long", received=f"{self.answer_s:g} s"))
        except Exception as error:  # handed on to whoever listens, who sorts it
            queue.put_nowait(error)
        finally:
            if not running.whole:
                self.sampler.abort(running.request_id)
            tokens, digest = running.held()
            self.leases.give_back(lease, tokens, digest)
        if running.ended is not None:
            queue.put_nowait(running.ended)

    async def _send(self, running: _Running) -> None:
        """Sends what the session does not hold; all, if it no longer holds what it did."""
        known = running.lease.num_known(running.job.prompt)
        try:
            await self._stream(running, known)
        except PrefixMissError:
            if not known or running.num_tokens:
                raise
            await self._stream(running, 0)

    async def _stream(self, running: _Running, known: int) -> None:
        job, lease = running.job, running.lease
        running.num_known, running.request_id = known, f"{lease.session_id}:{next(_NUMBERS)}"
        request = SampleRequest(
            id=running.request_id,
            session_id=lease.session_id,
            suffix=job.prompt[known:],
            params=job.params,
            stop_tokens=job.stop_tokens,
            rng_key=job.rng_key,
            prefix_digest=lease.prefix_digest if known else None,
            pool=self.pool,
            streaming=True,
        )
        chunks = self.sampler.stream(request)
        try:
            async for chunk in chunks:
                if running.take(chunk):
                    return
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
        raise SamplerError("the request ended before the answer did", field="chunk.finish")


_NUMBERS = itertools.count()


@dataclass(slots=True, eq=False)
class _Running:
    """One answer while it is sampled."""

    job: Job
    lease: Lease
    queue: asyncio.Queue[Event | BaseException]
    request_id: str = ""
    num_known: int = 0
    num_tokens: int = 0
    whole: bool = False
    """The sampler has ended the request by itself: it runs no more, and the session holds all of it."""
    ended: Ended | None = None
    _begun: bool = False
    _tokens: list[Tokens] = field(default_factory=list[Tokens])
    _digest: str = ""

    def take(self, chunk: SampleChunk) -> bool:
        """Takes a chunk in; whether the answer is complete. Raises SamplerError."""
        if chunk.finish == "abort":
            raise SamplerError("the request was aborted from outside", field="chunk.finish")
        reader = self.job.reader
        parts, count = reader.feed(chunk.tokens)
        cut = count < len(chunk.tokens) or (reader.ended and chunk.finish is None)
        self.whole = chunk.finish is not None
        if chunk.finish is not None or reader.ended:
            parts = [*parts, *reader.finish()]
        self._tokens.append(chunk.tokens)
        self._digest = "" if cut else chunk.prefix_digest
        self.num_tokens += count
        num_before = len(self.job.prompt) + self.num_tokens - count
        served = cut_chunk(chunk, count, num_before) if cut else chunk
        self.queue.put_nowait(Sampled(parts, served, self.job.index, self._num_cached(chunk)))
        if chunk.finish is None and not reader.ended:
            return False
        ending: Ending = "calls" if reader.answer.calls and reader.stop is None else "stop"
        if chunk.finish == "length" and not reader.ended:
            ending = "length"
        self.job.remember(np.concatenate(self._tokens)[: self.num_tokens])
        self.ended = Ended(ending, self.num_tokens, reader.stop, self.job.index)
        return True

    def _num_cached(self, chunk: SampleChunk) -> int:
        if self._begun:
            return 0
        self._begun = True
        return self.num_known if chunk.cached_tokens is None else chunk.cached_tokens

    def held(self) -> tuple[Tokens | None, str | None]:
        """What the session holds after the request, if that is certain."""
        if not self.whole or not self._digest:
            return None, None
        return np.concatenate([self.job.prompt, *self._tokens]), self._digest


def random_key() -> int:
    """The noise of an answer whose client named no seed."""
    return secrets.randbits(62)
