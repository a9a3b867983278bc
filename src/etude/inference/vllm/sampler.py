"""vLLM as a Sampler and a WeightSink.

    sessions ──stream()──> /inference/v1/generate ──tokens, labels──> chunks, one per policy version
                                                   └─ etude_take_routes ─> routes, with the last chunk

Token ids go in and come out; nothing is ever decoded. A message that is not streamed is one request and one
answer. A streamed one comes step by step; which version a token has is then known from how far the request
was when vLLM paused, and checked against what vLLM says at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from etude.errors import SamplerError
from etude.inference.vllm.answers import Finish, Part, Routes, Span, Tokens, read_part, read_routes
from etude.inference.vllm.client import VllmClient
from etude.inference.vllm.replica import Activation, Replica
from etude.inference.vllm.sessions import Session, Sessions, seed_of
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams, Scores, WeightManifest

_ABORT_GRACE_S = 60.0
"""After an abort vLLM answers at its next step, or when weights have been exchanged; beyond this it is taken
for dead."""
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Running:
    """One request in flight."""

    request: SampleRequest
    session: Session
    began: int
    """Length of the replica's history when it was sent."""
    name: str = field(default_factory=lambda: f"etude-{uuid4().hex}")
    """How vLLM knows it."""
    prompt: int = 0
    """Tokens of the prompt."""
    sampled: int = 0
    """Tokens that have been handed out."""
    handed: list[Span] = field(default_factory=list[Span])
    """Their labels."""
    routes: Routes | None = None
    """That came with the answer."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class VllmSampler:
    """A replica of vLLM. Use as an async context manager: on the way out the server ends."""

    def __init__(self, replica: Replica, *, has_tokenizer: bool = False) -> None:
        """`has_tokenizer`: whether snapshots carry tokenizer.json: only then can stop texts be found."""
        self.replica = replica
        self._has_tokenizer = has_tokenizer
        self._sessions = Sessions()
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> VllmSampler:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self.replica.close()

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage."""
        await self.replica.stage(manifest)

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate."""
        await self.replica.activate(version, kv)

    def current(self) -> PolicyVersion | None:
        """See WeightSink.current."""
        return self.replica.current()

    # ---- Sampler --------------------------------------------------------------------------------

    def open(self, session_id: str) -> None:
        """See Sampler.open."""
        self._sessions.open(session_id)

    def close(self, session_id: str) -> None:
        """See Sampler.close. A request in flight is aborted."""
        session = self._sessions.close(session_id)
        if session is not None and session.request_id is not None:
            self.abort(session.request_id)

    def abort(self, request_id: str) -> None:
        """See Sampler.abort."""
        running = self._running.get(request_id)
        if running is None or running.aborted.is_set():
            return
        running.aborted.set()
        task = asyncio.get_running_loop().create_task(self._abort(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score."""
        name = f"etude-{uuid4().hex}"
        self._check_version(version, is_minimum=False)
        part = await self.replica.score(tokens, name)
        for span in part.spans:
            activation = await self.replica.verified(span.label)
            if activation.version != version:
                raise SamplerError(
                    "version was replaced meanwhile", field="version", received=str(activation.version)
                )
        routes = await self._take_routes(await self.replica.client(), name) or part.routes
        assert part.prompt_logprobs is not None
        return Scores(part.prompt_logprobs, version, None if routes is None else routes.experts)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream. While the server begins again, requests wait; `deadline_s` counts from here.

        A stream that is not read to its end aborts its request.
        """
        _check_request(request, self._has_tokenizer)
        client = await self._client(request)
        abilities = self.replica.abilities
        assert abilities is not None
        if request.version is not None:
            self._check_version(request.version, is_minimum=request.version_is_minimum)
        session = self._sessions.begin(request, abilities.vocab_size, abilities.max_tokens)
        running = _Running(request, session, len(self.replica.history), prompt=len(session.tokens))
        self._running[request.id] = running
        if request.streaming:
            self.replica.streams.add(running.name)
        is_answered = False
        try:
            async with contextlib.aclosing(self._answer(running, client)) as chunks:
                async for chunk in chunks:
                    is_answered = chunk.finish is not None
                    yield chunk
        finally:
            self._running.pop(request.id, None)
            self.replica.streams.discard(running.name)
            if not is_answered:
                session.lose()

    # ---- one request ----------------------------------------------------------------------------

    async def _client(self, request: SampleRequest) -> VllmClient:
        """The server. Raises SamplerError if there is none, or none before the deadline."""
        try:
            return await asyncio.wait_for(self.replica.client(), request.deadline_s)
        except TimeoutError:
            raise SamplerError(
                "vLLM was not ready before the deadline", field="deadline_s", received=request.deadline_s
            ) from None

    async def _answer(self, running: _Running, client: VllmClient) -> AsyncGenerator[SampleChunk]:
        deadline: asyncio.TimerHandle | None = None
        request = running.request
        if request.deadline_s is not None:
            deadline = asyncio.get_running_loop().call_later(request.deadline_s, self.abort, request.id)
        try:
            finish: Finish | None = None
            pending: list[SampleChunk] = []
            async with contextlib.aclosing(self._parts(running, client)) as parts:
                async for part in parts:
                    for chunk in pending:
                        yield chunk
                    pending = await self._chunks(running, part)
                    finish = part.finish or finish
            if finish is None:
                raise SamplerError("vLLM's stream ended before the message", received=request.id)
            routes = await self._take_routes(client, running.name) or running.routes
            for chunk in await self._closing_chunks(running, pending, finish, routes):
                yield chunk
        finally:
            if deadline is not None:
                deadline.cancel()

    async def _parts(self, running: _Running, client: VllmClient) -> AsyncGenerator[Part]:
        request, body = running.request, self._body(running)
        count = request.params.top_logprobs
        if request.streaming:
            async with contextlib.aclosing(client.generate_events(body)) as events:
                while True:
                    event = await _unless_stuck(running, anext(events, None))
                    if event is None:
                        return
                    part = read_part(event, count)
                    running.routes = part.routes or running.routes
                    if len(part.sampled.tokens) or part.finish is not None:
                        yield part
        part = read_part(await _unless_stuck(running, client.generate(body)), count)
        running.routes = part.routes
        yield part

    def _body(self, running: _Running) -> dict[str, Any]:
        request, session, params = running.request, running.session, running.request.params
        abilities = self.replica.abilities
        assert abilities is not None
        room = abilities.max_tokens - running.prompt
        sampling: dict[str, Any] = {
            "max_tokens": min(params.max_tokens, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": seed_of(request.rng_key, running.prompt),
            "logprobs": params.top_logprobs,
            "stop_token_ids": sorted(request.stop_tokens),
            "ignore_eos": True,
            "detokenize": bool(request.stop_texts),
        }
        if request.stop_texts:
            sampling |= {"stop": list(request.stop_texts), "include_stop_str_in_output": True}
        return {
            "request_id": running.name,
            "token_ids": session.tokens.tolist(),
            "sampling_params": sampling,
            "cache_salt": self._salt(running, session),
        }

    def _salt(self, running: _Running, session: Session) -> str:
        """Who may share keys with whom: sessions that began under the same version; and each only with
        itself where the routes of shared keys would be lost."""
        if session.oldest is None:
            session.oldest = max(running.began - 1, 0)
        start = self.replica.history[session.oldest].label if self.replica.history else ""
        abilities = self.replica.abilities
        alone = abilities is not None and abilities.captures
        # vLLM bounds a salt's length and letters.
        salt = f"{start}|{session.id}|{session.epoch}" if alone else start
        return xxh3_128_hexdigest(salt.encode())

    async def _abort(self, running: _Running) -> None:
        with contextlib.suppress(SamplerError):
            client = await self.replica.client()
            # vLLM puts a word of its own before the names of these requests.
            await client.abort(f"generate-tokens-{running.name}")

    async def _take_routes(self, client: VllmClient, name: str) -> Routes | None:
        abilities = self.replica.abilities
        if abilities is None or not abilities.captures:
            return None
        found = await client.call_workers("etude_take_routes", name)
        document = (found or {}).get(name)
        return None if document is None else read_routes(document)

    # ---- chunks ---------------------------------------------------------------------------------

    async def _chunks(self, running: _Running, part: Part) -> list[SampleChunk]:
        """What has come, cut where the version changes. Waits until each label is verified."""
        await self.replica.settled()
        count = len(part.sampled.tokens)
        end = running.sampled + count
        spans = list(part.spans) if part.spans else self._spans(running, end)
        if part.spans and running.handed:
            _check_spans(running.handed, part.spans)
        chunks: list[SampleChunk] = []
        for span in spans:
            start, stop = max(span.start, running.sampled), min(span.end, end)
            if stop <= start:
                continue
            activation = await self.replica.verified(span.label)
            tokens = part.sampled[start - running.sampled : stop - running.sampled]
            chunks.append(self._chunk(running, tokens, activation))
            running.handed.append(Span(span.label, start, stop))
        if count and sum(len(chunk.tokens) for chunk in chunks) != count:
            raise SamplerError("vLLM's version spans leave tokens out", received=spans)
        running.session.append(part.sampled.tokens)
        running.sampled = end
        return chunks

    def _spans(self, running: _Running, end: int) -> list[Span]:
        """Labels of the tokens up to `end`, by how far the request was at each exchange of weights."""
        history = self.replica.history
        label, start, spans = history[running.began - 1].label, 0, list[Span]()
        for activation in history[running.began :]:
            computed = activation.progress.get(running.name, 0)
            at = min(max(computed - running.prompt + 1, 0), end)
            spans.append(Span(label, start, at))
            label, start = activation.label, at
        return [*spans, Span(label, start, end)]

    def _chunk(self, running: _Running, tokens: Tokens, activation: Activation) -> SampleChunk:
        params = running.request.params
        return SampleChunk(
            tokens=tokens.tokens,
            logprobs=tokens.logprobs,
            version=activation.version,
            kv_oldest=self._oldest(running.session.oldest or 0, activation),
            raw_logprobs=tokens.logprobs if params.raw_logprobs else None,
            top_tokens=tokens.top_tokens,
            top_logprobs=tokens.top_logprobs,
        )

    def _oldest(self, since: int, activation: Activation) -> PolicyVersion:
        """The oldest version whose keys were seen: that in which the session began, or the last after which
        all keys were computed again."""
        history = self.replica.history
        until = history.index(activation)
        for place in range(until, since, -1):
            if history[place].kv == "recompute":
                return history[place].version
        return history[min(since, until)].version

    async def _closing_chunks(
        self, running: _Running, pending: list[SampleChunk], finish: Finish, routes: Routes | None
    ) -> list[SampleChunk]:
        """The last chunks; the very last has the finish, the digest and the routes."""
        session = running.session
        if not pending:
            version = self.replica.history[-1].version
            nothing = np.zeros(0, dtype=np.int32)
            pending = [SampleChunk(nothing, nothing.astype(np.float32), version, version)]
        if routes is not None:
            if routes.start > session.routed:
                raise SamplerError(
                    "routes of some positions are missing", received=(session.routed, routes.start)
                )
            session.routed = routes.start + len(routes.experts)
        last = pending[-1]
        closing = SampleChunk(
            last.tokens,
            last.logprobs,
            last.version,
            last.kv_oldest,
            None if routes is None else routes.experts,
            0 if routes is None else routes.start,
            finish,
            session.settle(),
            last.raw_logprobs,
            last.top_tokens,
            last.top_logprobs,
        )
        return [*pending[:-1], closing]

    def _check_version(self, wanted: PolicyVersion, *, is_minimum: bool) -> None:
        current = self.current()
        serves = current is not None and current.lineage == wanted.lineage
        if current is not None and serves and current.step == wanted.step:
            serves = wanted.digest in ("", current.digest)
        elif current is not None:
            serves = serves and is_minimum and current.step > wanted.step
        if not serves:
            raise SamplerError(
                "version is not served", field="version", received=f"{wanted}; serving {current}"
            )


async def _unless_stuck(running: _Running, work: Awaitable[T]) -> T:
    """The result of `work`; SamplerError if the request was aborted and vLLM still says nothing."""
    working = asyncio.ensure_future(work)
    giving_up = asyncio.ensure_future(_grace_after(running.aborted))
    try:
        await asyncio.wait({working, giving_up}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise SamplerError("vLLM does not answer to an abort", received=running.request.id)
        return working.result()
    finally:
        for task in (working, giving_up):
            task.cancel()
        await asyncio.gather(working, giving_up, return_exceptions=True)


async def _grace_after(aborted: asyncio.Event) -> None:
    await aborted.wait()
    await asyncio.sleep(_ABORT_GRACE_S)


def _check_spans(handed: list[Span], said: tuple[Span, ...]) -> None:
    """Raises SamplerError if vLLM's own account differs from what was handed out."""
    for span in handed:
        if not any(
            true.label == span.label and true.start <= span.start and span.end <= true.end for true in said
        ):
            raise SamplerError("vLLM names another version for tokens that were handed out", received=said)


def _check_request(request: SampleRequest, has_tokenizer: bool) -> None:
    params: SamplingParams = request.params
    is_raw = params.temperature in (0.0, 1.0) and not (params.truncated and params.temperature > 0)
    if params.raw_logprobs and not is_raw:
        raise SamplerError(
            "vLLM reports one kind of log-probabilities, and here it is the processed one",
            field="raw_logprobs",
            received=params,
            fix="ask for them at temperature 1 without truncation, or score the answer",
        )
    if request.stop_texts and not has_tokenizer:
        raise SamplerError(
            "this replica has no tokenizer",
            field="stop_texts",
            received=request.stop_texts,
            fix="publish snapshots with tokenizer.json beside them, or use stop_tokens",
        )
