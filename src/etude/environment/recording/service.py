"""Samples the answers of recorded sessions.

    request --begin--> branch --SampleRequest--> sampler
       ^                                            | chunks
       |            commit <--- _sample (a task) <--+
       +-- events <--- queue <----------'

Sampling is a separate task, which a disconnecting client does not cancel. The request is aborted, and the
tokens sampled so far are committed, so that a client that cut the stream on purpose and continues from the
cut text continues from these tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from blake3 import blake3

from etude.environment.recording.branches import History
from etude.environment.recording.journal import SessionJournal
from etude.environment.recording.session_map import Generation, SessionMap
from etude.errors import EtudeError, InfrastructureError, PrefixMissError, SamplerError, StoreError
from etude.kit.tasks import Tasks
from etude.protocols import Sampler
from etude.records import SampleChunk, SampleRequest, SamplingParams
from etude.tokens.chat.answers import Ended, Ending, Event, Sampled
from etude.tokens.chat.messages import Message
from etude.tokens.chat.reader import AnswerReader, ReadingRules, cut_chunk


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for an answer, independent of its API."""

    messages: tuple[Message, ...]
    """The opening first."""
    params: SamplingParams
    rules: ReadingRules = field(default_factory=ReadingRules)
    seed: int | None = None
    stream: bool = False
    """Whether the answer is streamed to the client as it is sampled."""


@dataclass(slots=True, eq=False)
class AnswerService:
    """Samples answers for one session map, several concurrently."""

    session_map: SessionMap
    sampler: Sampler
    answer_s: float = 600.0
    """Time limit of one answer."""
    abort_s: float = 30.0
    """Time in which an aborted request must end; after it its tokens are discarded."""
    journal: SessionJournal | None = None
    """Records the map's inputs; None: they are not recorded."""
    rng_key: tuple[int, ...] = ()
    """Key of the sampling noise, before a branch's number; empty: derived from the session's name."""
    tasks: Tasks = field(init=False, default_factory=Tasks)
    """Answers that are being sampled."""
    _opened: set[str] = field(init=False, default_factory=set)
    _numbers: itertools.count[int] = field(init=False)
    _live: set[_Running] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        # A recovered session continues the numbering, so that request ids stay unique.
        self._numbers = itertools.count(self.session_map.counts.requests)

    async def encode(self, messages: Sequence[Message]) -> History:
        """The history of these messages; long new ones are encoded in a thread. Raises as `start`."""
        work = self.session_map.encoding(messages)
        return History.of(messages) if work is None else await asyncio.to_thread(work)

    def start(self, ask: Ask, history: History | None = None) -> tuple[int, AsyncGenerator[Event]]:
        """Starts to sample the answer to a request; returns the number of tokens of its context and the
        events in order, `Ended` last. `history`: that of the request, if it was encoded before.

        Raises BadRequestError, ContextLengthError and StoreError; then nothing is sampled. The events raise
        InfrastructureError if the sampler fails: then the answer is discarded, and the same history can be
        sent again. Closing them early aborts the request.
        """
        generation = self.session_map.begin(history or ask.messages, ask.params)
        reader, number = AnswerReader(generation.branch.framing.renderer, ask.rules), 0
        try:
            if self.journal is not None:
                number = self.journal.begin(ask.messages, ask.params)
        except StoreError:
            self.session_map.fail(generation)
            raise
        running = _Running(generation, self._request(generation, ask), reader, number)
        running.task = self.tasks.start(self._sample(running))
        self._live.add(running)
        return len(generation.tokens), self._events(running)

    async def _events(self, running: _Running) -> AsyncGenerator[Event]:
        try:
            while True:
                event = await running.queue.get()
                if isinstance(event, EtudeError):
                    raise event
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            if not running.task.done():
                self._abort(running)

    async def stop(self) -> None:
        """Aborts all sampling, waits for its end, and closes the sampler's sessions."""
        for running in list(self._live):
            self._abort(running)
        await self.tasks.wait(self.abort_s)
        self.tasks.cancel()
        await self.tasks.wait(self.abort_s)
        for name in sorted(self._opened):
            self.sampler.close(name)
        self._opened.clear()

    def _abort(self, running: _Running) -> None:
        if running.aborted:
            return
        running.aborted = True
        self.sampler.abort(running.request.id)
        asyncio.get_running_loop().call_later(self.abort_s, running.task.cancel)

    def _request(self, generation: Generation, ask: Ask) -> SampleRequest:
        branch = generation.branch
        # A session's noise is a function of its name alone.
        name = blake3(self.session_map.trajectory_id.encode()).digest(6)
        noise = self.rng_key or (int.from_bytes(name, "big"),)
        key = (ask.seed,) if ask.seed is not None else (*noise, branch.number)
        return SampleRequest(
            id=f"{branch.id}:{next(self._numbers)}",
            session_id=branch.id,
            suffix=generation.tokens[branch.known :],
            params=generation.params,
            stop_tokens=branch.framing.renderer.end_tokens,
            rng_key=key,
            prefix_digest=branch.prefix_digest,
            deadline_s=self.answer_s,
            # Stop strings must be detected before more is sampled.
            streaming=ask.stream or bool(ask.rules.stops) or ask.rules.single_call,
        )

    async def _sample(self, running: _Running) -> None:
        """Samples one answer to its end and commits it; the queue always gets a final event or error."""
        generation = running.generation
        try:
            if generation.branch.id not in self._opened:
                self._opened.add(generation.branch.id)
                self.sampler.open(generation.branch.id)
            try:
                await self._stream(running)
            except PrefixMissError:
                if running.request.prefix_digest is None or running.chunks:
                    raise
                self._resend_context(running)
                await self._stream(running)
            await self._commit(running)
        except InfrastructureError as error:
            self._fail(running, error)
        except TimeoutError:
            self.sampler.abort(running.request.id)
            self._fail(running, SamplerError("the answer took too long", received=self.answer_s))
        except asyncio.CancelledError:
            self._fail(running, SamplerError("the answer was given up"))
            raise
        except Exception as error:
            self.sampler.abort(running.request.id)
            self._fail(running, SamplerError("the sampler failed", received=repr(error)))
            raise
        finally:
            self._live.discard(running)

    def _resend_context(self, running: _Running) -> None:
        """Sends the whole context again, after the sampler has dropped the branch."""
        branch = running.generation.branch
        branch.known, branch.prefix_digest = 0, None
        request, tokens = running.request, running.generation.tokens
        running.request = replace(request, id=f"{request.id}w", suffix=tokens, prefix_digest=None)
        if running.aborted:
            self.sampler.abort(running.request.id)

    async def _stream(self, running: _Running) -> None:
        """Receives the chunks, within the time limit of an answer. Chunks after a stop string are received
        and dropped."""
        async with asyncio.timeout(self.answer_s):
            async for chunk in self.sampler.stream(running.request):
                if not running.reader.ended:
                    self._add_chunk(running, chunk)
                    if running.reader.ended and chunk.finish is None:
                        self.sampler.abort(running.request.id)
                if chunk.finish is not None:
                    running.finish = running.finish or chunk.finish
        if running.finish is None:
            raise SamplerError("the request ended before the answer did", field="chunk.finish")
        if running.finish == "abort" and not running.aborted:
            raise SamplerError("the request was aborted from outside", field="chunk.finish")

    def _add_chunk(self, running: _Running, chunk: SampleChunk) -> None:
        parts, count = running.reader.feed(chunk.tokens)
        if running.reader.ended:
            running.finish, running.cut = "stop", count < len(chunk.tokens) or chunk.finish is None
            chunk = cut_chunk(chunk, count, len(running.generation.tokens) + running.num_tokens)
        running.chunks.append(chunk)
        running.num_tokens += len(chunk.tokens)
        if len(chunk.tokens):
            running.queue.put_nowait(Sampled(parts, chunk))

    async def _commit(self, running: _Running) -> None:
        """Records the answer; the client is sent its end after it is durable."""
        branch, reader, counts = running.generation.branch, running.reader, self.session_map.counts
        rest = reader.finish()
        chunks, known, aborted = running.chunks, branch.known, running.finish == "abort"
        self.session_map.commit(running.generation, chunks, reader.answer)
        running.committed = True
        held = chunks[-1].prefix_digest if chunks and not running.cut else None
        branch.known, branch.prefix_digest = (branch.recording.length, held) if held else (0, None)
        counts.malformed_calls += reader.num_malformed
        counts.aborted += aborted
        if self.journal is not None:
            self.journal.commit(running.number, chunks, reader.answer, known, reader.num_malformed, aborted)
            await self.journal.sync()
        if rest:
            running.queue.put_nowait(Sampled(rest, None))
        running.queue.put_nowait(Ended(_ending(running), running.num_tokens, reader.stop))

    def _fail(self, running: _Running, error: InfrastructureError) -> None:
        if not running.committed:  # else its tokens are recorded, durably or not
            self.session_map.fail(running.generation, running.aborted)
            if self.journal is not None:
                self.journal.fail(running.number, running.aborted)
        running.queue.put_nowait(error)


@dataclass(slots=True, eq=False)
class _Running:
    """One answer that is being sampled."""

    generation: Generation
    request: SampleRequest
    reader: AnswerReader
    number: int
    """In the journal."""
    task: asyncio.Task[None] = field(init=False)
    """The task that samples it."""
    queue: asyncio.Queue[Event | EtudeError] = field(default_factory=asyncio.Queue)
    chunks: list[SampleChunk] = field(default_factory=list[SampleChunk])
    num_tokens: int = 0
    finish: str | None = None
    cut: bool = False
    """Whether tokens were dropped that the sampler still has."""
    aborted: bool = False
    """Whether the client has disconnected."""
    committed: bool = False
    """Whether the answer is in the map."""


def _ending(running: _Running) -> Ending:
    if running.finish in ("length", "abort"):
        return "length" if running.finish == "length" else "abort"
    return "calls" if running.reader.answer.calls and running.reader.stop is None else "stop"
