"""A real server on loopback over a scripted sampler, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx
import numpy as np
import uvicorn
from numpy.typing import NDArray

from etude.errors import SamplerError, WeightUpdateError
from etude.inference.server import Keys, ServedModel, ServerLimits, ServerState, build_app
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest
from etude.tokens import ETUDE_TEMPLATE, Renderer, train_tokenizer
from etude.tokens.chat.renderer_cache import RendererCache
from etude.tokens.grammar import XmlGrammar
from tests.environment.recording.recording_builders import (
    READ,
    TEXTS,
    answer_tokens,
    qwen_tokenizer,
    renderers,
)
from tests.fakes.scripted import ScriptedSampler

START_S = 60.0
MODEL = "tiny"
ADMIN = "administrator-token"
Tokens = NDArray[np.int32]


@cache
def _tls() -> ssl.SSLContext:
    """One for all clients: each takes its time to make."""
    return httpx.create_ssl_context()


@dataclass
class PlayedSampler:
    """Plays answers token by token, as an engine does: can wait, fail, change its version in mid-answer."""

    answers: Callable[[Tokens], str] | None = None
    """The context so far -> the next answer's text; None: `tokens` says the tokens themselves."""
    tokens: Callable[[Tokens], Tokens] | None = None
    chunk_tokens: int = 3
    route_shape: tuple[int, int] | None = (2, 2)
    pause_s: float = 0.0
    failures: list[str] = field(default_factory=list[str])
    """For requests to come: `before` or `amid`."""
    cached: int | None = None
    """Tokens that it says it found in its cache."""
    swap_after: int = 0
    """Chunks after which the version goes up; 0: never."""
    aborted: list[str] = field(default_factory=list[str])
    closed: list[str] = field(default_factory=list[str])
    open_sessions: set[str] = field(default_factory=set[str])
    inner: ScriptedSampler = field(init=False)

    def __post_init__(self) -> None:
        def script(session_id: str, context: Tokens) -> Tokens:
            if self.tokens is not None:
                return self.tokens(context)
            assert self.answers is not None
            return answer_tokens(self.answers(context))

        self.inner = ScriptedSampler(script, route_shape=self.route_shape, chunk_tokens=self.chunk_tokens)

    @property
    def requests(self) -> list[SampleRequest]:
        return self.inner.requests

    def reset(self, answers: Callable[[Tokens], str]) -> None:
        """As new, with these answers."""
        self.answers, self.tokens, self.pause_s = answers, None, 0.0
        for held in (self.failures, self.aborted, self.closed, self.requests):
            held.clear()

    def open(self, session_id: str, sibling: str | None = None) -> None:
        assert session_id not in self.open_sessions
        self.open_sessions.add(session_id)
        self.inner.open(session_id)

    def close(self, session_id: str) -> None:
        self.open_sessions.discard(session_id)
        self.closed.append(session_id)
        self.inner.close(session_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.inner.abort(request_id)

    async def score(self, tokens: Tokens, version: PolicyVersion) -> Scores:
        return await self.inner.score(tokens, version)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "before":
            raise SamplerError("the engine is dead")
        place = 0
        async for chunk in self.inner.stream(request):
            count = len(chunk.tokens)
            number = place // self.chunk_tokens
            step = int(bool(self.swap_after) and number >= self.swap_after)
            version = replace(chunk.version, step=step)
            logprobs = -np.arange(place, place + count, dtype=np.float32) / 64
            cached = None if place else self.cached
            place += count
            chunk = replace(chunk, logprobs=logprobs, version=version, cached_tokens=cached)
            yield self._told(chunk, request)
            if failure == "amid":
                raise SamplerError("the engine died")
            await asyncio.sleep(self.pause_s)

    def _told(self, chunk: SampleChunk, request: SampleRequest) -> SampleChunk:
        raw = chunk.logprobs - 1 if request.params.raw_logprobs else None
        top, count = request.params.top_logprobs, len(chunk.tokens)
        if not top:
            return replace(chunk, raw_logprobs=raw)
        tokens = np.tile(np.arange(65, 65 + top, dtype=np.int32), (count, 1))
        tokens[:, 0] = chunk.tokens
        logprobs = chunk.logprobs[:, None] - np.arange(top, dtype=np.float32)
        return replace(chunk, raw_logprobs=raw, top_tokens=tokens, top_logprobs=logprobs)


@dataclass
class PlayedSink:
    """A WeightSink that takes what it is told to take."""

    version: PolicyVersion | None = PolicyVersion("scripted", 0)  # noqa: RUF009
    staged: PolicyVersion | None = None
    kv: str = ""

    async def stage(self, manifest: WeightManifest) -> None:
        if not manifest.tensors:
            raise WeightUpdateError("other tensors than the model's", field="tensors", received=[])
        self.staged = manifest.version

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        if version != self.staged:
            raise WeightUpdateError("version is not staged", field="version", received=str(version))
        self.version, self.kv = version, kv

    def current(self) -> PolicyVersion | None:
        return self.version


@dataclass
class Served:
    """A server that runs."""

    url: str
    state: ServerState
    server: uvicorn.Server

    def openai(self, key: str = "unused", **options: Any) -> Any:
        """The official client."""
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            http_client=httpx.Client(verify=_tls(), timeout=60),
            **({"max_retries": 0} | options),
        )

    def http(self, token: str = "", **headers: str) -> httpx.Client:
        """A plain client."""
        more = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers={**more, **headers}, timeout=60, verify=_tls())


def make_state(
    sampler: Any, sink: Any = None, keys: Keys | None = None, model: ServedModel | None = None, **limits: Any
) -> ServerState:
    """A state over a sampler; options of ServerLimits."""
    return ServerState(
        model or qwen_model(),
        sampler,
        sink or PlayedSink(),
        keys,
        ServerLimits(**limits),
        ADMIN,
    )


def qwen_model(max_context_tokens: int = 2000, **options: Any) -> ServedModel:
    """A model that speaks Hermes in Qwen's frame."""
    tokenizer = qwen_tokenizer()
    ends = frozenset((tokenizer.control_id("<|im_end|>"),))
    return ServedModel(MODEL, tokenizer, ends, max_context_tokens, renderers(), **options)


def xml_model() -> tuple[ServedModel, Renderer]:
    """A model that speaks our own grammar in our own frame, and a renderer for its answers."""
    grammar = XmlGrammar([READ])
    controls = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens()]
    tokenizer = train_tokenizer(TEXTS, 256 + len(controls) + 20, controls)
    ends = frozenset((tokenizer.control_id("<|end|>"),))
    shelved = RendererCache(tokenizer, XmlGrammar, ETUDE_TEMPLATE)
    return ServedModel(MODEL, tokenizer, ends, 2000, shelved), Renderer(tokenizer, grammar)


@contextlib.contextmanager
def serving(make: Callable[[], ServerState] | ServerState, app: Any = None) -> Iterator[Served]:
    """Serves on a free port, in a thread of its own."""
    state = make if isinstance(make, ServerState) else make()
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # by which asyncio knows to send at once
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app or build_app(state), log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    end_s = time.monotonic() + START_S
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end_s, "the server did not start"
        time.sleep(0.01)
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", state, server)
    finally:
        server.should_exit = True
        thread.join(START_S)
        listener.close()


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Waits until a condition holds."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition never held"
        time.sleep(0.01)


def replies(texts: Sequence[str]) -> Callable[[Tokens], str]:
    """The texts, one for each request."""
    remaining = iter(texts)
    return lambda context: next(remaining)
