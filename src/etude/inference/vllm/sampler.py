"""vLLM as a Sampler and a WeightSink.

    sessions ──stream()──> /inference/v1/generate ──tokens──> chunks, one per policy version
                                                   └─ etude_take_routes ─> routes, with the last chunk

Token ids in, token ids out; no text is decoded. A message that is not streamed is one request and one answer;
a streamed one comes step by step. A token's version follows from the progress of its request when the worker
swapped the weights, and is checked against what vLLM reports at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from etude.errors import EtudeError, SamplerError
from etude.inference.requests import already_open, not_open, not_served, serves
from etude.inference.times import EngineCounters, ServiceTimes
from etude.inference.vllm.answers import Finish, Part, Routes, read_part, read_routes
from etude.inference.vllm.client import Abilities, VllmClient
from etude.inference.vllm.replica import Replica
from etude.inference.vllm.requests import Running, Session, check_request
from etude.kit.tasks import Tasks
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest

DRAIN_S = 30.0
"""Time to wait for requests in flight when closing."""
_ABORT_AGAIN_S = 0.5


class VllmSampler:
    """A replica of vLLM. Use as an async context manager: on exit it waits for requests in flight and stops
    the server. Implements Sampler and WeightSink."""

    def __init__(self, replica: Replica, *, drain_s: float = DRAIN_S) -> None:
        """`drain_s`: time to wait for requests in flight when closing; then they are aborted."""
        self.replica = replica
        self.counters = EngineCounters()
        """Tokens of answered messages; vLLM's steps are not counted."""
        self.times = ServiceTimes()
        """Times of weight updates only."""
        self._drain_s = drain_s
        self._is_draining = False
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[str, asyncio.Timeout] = {}
        """By request, while it waits for the server; removed when it is aborted."""
        self._running: dict[str, Running] = {}
        self._tasks = Tasks()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> VllmSampler:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.drain(self._drain_s if kind is None else 0.0)
        finally:
            self._tasks.cancel()
            await self.replica.close()

    async def drain(self, timeout_s: float) -> None:
        """Accepts no more requests and waits for those in flight; after `timeout_s` aborts the rest."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        for request_id in list(self._running):
            self.abort(request_id)

    @property
    def failure(self) -> EtudeError | None:
        """The error that has permanently stopped the replica, if any."""
        return self.replica.failure

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage, and Replica.stage."""
        began = time.perf_counter()
        await self.replica.stage(manifest)
        self.times.stage_s += time.perf_counter() - began

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        await self.replica.activate(version, kv)
        pause_s = self.replica.times.pause_s
        self.counters.weight_updates += 1
        self.times.swap_s += pause_s
        self.times.longest_swap_s = max(self.times.longest_swap_s, pause_s)

    def current(self) -> PolicyVersion | None:
        return self.replica.current()

    # ---- Sampler --------------------------------------------------------------------------------

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open. `sibling` is not needed: vLLM finds shared prefixes itself."""
        if session_id in self._sessions:
            raise already_open(session_id)
        self._sessions[session_id] = Session(session_id)

    def close(self, session_id: str) -> None:
        """See Sampler.close. A request in flight is aborted."""
        session = self._sessions.pop(session_id, None)
        if session is not None and session.request_id is not None:
            self.abort(session.request_id)

    def abort(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            if not waiting.expired():
                waiting.reschedule(0.0)
            return
        running = self._running.get(request_id)
        if running is None or running.aborted.is_set():
            return
        running.aborted.set()
        self._tasks.start(self._abort(running))

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        name = f"etude-{uuid4().hex}"
        client = await self.replica.client()
        self._check_version(version, is_minimum=False)
        place = len(self.replica.history)
        part = await self.replica.score(client, tokens, name)
        await self.replica.wait_until_settled(client)
        if len(self.replica.history) != place:
            raise SamplerError("version was replaced meanwhile", field="version", received=str(version))
        routes = await self._take_routes(client, name) or part.routes
        assert part.prompt_logprobs is not None
        return Scores(part.prompt_logprobs, version, None if routes is None else routes.experts)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream. Requests wait while the server restarts; `deadline_s` counts from this call.

        A stream that is not read to its end aborts its request.
        """
        check_request(request)
        deadline_s = request.deadline_s
        until = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        ready = await self._ready(request, until)
        if ready is None:
            yield self._nothing(request)
            return
        client, abilities = ready
        if request.version is not None:
            self._check_version(request.version, is_minimum=request.version_is_minimum)
        if (session := self._sessions.get(request.session_id)) is None:
            raise not_open(request.session_id)
        session.begin_request(request, abilities.vocab_size, abilities.max_tokens)
        history = self.replica.history
        running = Running(request, session, client, abilities, history, len(history), len(session.tokens))
        self._add(running)
        is_answered = False
        try:
            async with contextlib.aclosing(self._answer(running, until)) as chunks:
                async for chunk in chunks:
                    is_answered = chunk.finish is not None
                    yield chunk
        finally:
            self._remove(running)
            if not is_answered:
                session.reset()

    # ---- one request ----------------------------------------------------------------------------

    def _add(self, running: Running) -> None:
        self._running[running.request.id] = running
        self.replica.requests.add(running.name)
        self._idle.clear()

    def _remove(self, running: Running) -> None:
        self._running.pop(running.request.id, None)
        self.replica.requests.discard(running.name)
        running.history.remove_request(running.name, running.began)
        if not self._running:
            self._idle.set()

    def _nothing(self, request: SampleRequest) -> SampleChunk:
        """The answer to a request that was aborted before it was sent; its session is unchanged. Raises
        SamplerError before the first activation."""
        history = self.replica.history
        if not len(history):
            raise SamplerError("the request was aborted before there were weights", received=request.id)
        version, empty = history.last.version, np.zeros(0, dtype=np.int32)
        return SampleChunk(empty, empty.astype(np.float32), version, version, finish="abort")

    async def _ready(
        self, request: SampleRequest, until: float | None
    ) -> tuple[VllmClient, Abilities] | None:
        """Waits for the server, and for the end of a weight swap; None if the request was aborted meanwhile.
        Raises SamplerError if the server has failed or is not ready before `until` (loop time)."""
        try:
            async with asyncio.timeout_at(until) as waiting:
                self._waiting[request.id] = waiting
                client = await self.replica.client()
                await self.replica.wait_until_settled(client)
        except TimeoutError:
            if request.id not in self._waiting:
                return None
            raise SamplerError(
                "vLLM was not ready before the deadline", field="deadline_s", received=request.deadline_s
            ) from None
        finally:
            is_aborted = self._waiting.pop(request.id, None) is None
        if is_aborted:
            return None
        if self._is_draining:
            raise SamplerError("vLLM is being stopped", fix="use another replica")
        assert self.replica.abilities is not None
        return client, self.replica.abilities

    async def _answer(self, running: Running, until: float | None) -> AsyncGenerator[SampleChunk]:
        deadline: asyncio.TimerHandle | None = None
        request, client = running.request, running.client
        if until is not None:
            deadline = asyncio.get_running_loop().call_at(until, self.abort, request.id)
        try:
            finish: Finish | None = None
            pending: list[SampleChunk] = []
            async with contextlib.aclosing(self._parts(running)) as parts:
                async for part in parts:
                    for chunk in pending:
                        yield chunk
                    await self.replica.wait_until_settled(client)
                    pending = await running.chunks(part)
                    finish = part.finish or finish
            if finish is None:
                raise SamplerError("vLLM's stream ended before the message", received=request.id)
            routes = await self._take_routes(client, running.name) or running.routes
            self._count(running)
            for chunk in running.closing_chunks(pending, finish, routes):
                yield chunk
        finally:
            if deadline is not None:
                deadline.cancel()

    async def _parts(self, running: Running) -> AsyncGenerator[Part]:
        client, body = running.client, running.body()
        count = running.request.params.top_logprobs
        if not running.request.streaming:
            part = read_part(await running.unless_stuck(client.generate(body)), count)
            running.record(part)
            yield part
            return
        async with contextlib.aclosing(client.generate_events(body)) as events:
            while (event := await running.unless_stuck(anext(events, None))) is not None:
                part = read_part(event, count)
                if running.record(part):
                    yield part

    async def _abort(self, running: Running) -> None:
        # Repeatedly: the first abort may overtake the request, and is then ignored.
        while running.name in self.replica.requests:
            # vLLM prefixes the ids of these requests.
            await running.client.abort(f"generate-tokens-{running.name}")
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _take_routes(self, client: VllmClient, name: str) -> Routes | None:
        abilities = self.replica.abilities
        if abilities is None or not abilities.captures:
            return None
        found = await client.call_workers("etude_take_routes", name)
        document = (found or {}).get(name)
        return None if document is None else read_routes(document)

    def _count(self, running: Running) -> None:
        cached_tokens = running.cached_tokens or 0
        self.counters.decode_tokens += running.num_sampled
        self.counters.prefill_tokens += running.num_prompt - cached_tokens
        self.counters.cached_tokens += cached_tokens

    def _check_version(self, wanted: PolicyVersion, *, is_minimum: bool) -> None:
        current = self.current()
        if not serves(current, wanted, is_minimum):
            raise not_served(wanted, current)
