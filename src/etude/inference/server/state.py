"""What a server holds: its model, its sampler, its keys, and the requests that it is answering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.inference.headers import VERSION_HEADER
from etude.inference.server.answering import Answering
from etude.inference.server.chat import ServedAnswer, ServedModel
from etude.inference.server.errors import UnavailableError, VersionNotServedError
from etude.inference.server.leases import Leases
from etude.inference.server.limits import Key, Keys
from etude.inference.server.loans import LoanDesk
from etude.inference.server.side_channel import SideChannel, choice_tokens, encode
from etude.protocols import Sampler, WeightSink
from etude.records import PolicyVersion, SampleChunk
from etude.serving.metrics import Metrics
from etude.tokens.chat.answers import Ended, Event, Sampled
from etude.tokens.chat.histories import ChatFrames

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the buckets for whole waits."""
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends of the buckets for the time from token to token."""

_HISTOGRAMS: Mapping[str, tuple[tuple[float, ...], str]] = {
    "etude_serve_time_to_first_token_seconds": (LATENCY_S, "From the request's arrival to its first token."),
    "etude_serve_inter_token_seconds": (STEP_S, "From token to token of one answer."),
    "etude_serve_request_seconds": (LATENCY_S, "From the request's arrival to the end of its answer."),
}
_COUNTERS: Mapping[str, str] = {
    "etude_serve_requests": "Requests that were answered, by endpoint and status.",
    "etude_serve_prompt_tokens": "Tokens of prompts, cached ones included.",
    "etude_serve_cached_tokens": "Tokens of prompts that were not computed again.",
    "etude_serve_sampled_tokens": "Tokens sampled.",
    "etude_serve_aborted": "Requests whose client left before the answer was complete.",
    "etude_serve_engine_failures": "Requests that failed by no fault of their client's.",
    "etude_serve_weight_updates": "Versions put into service.",
}


def serve_metrics() -> Metrics:
    """Counts and times of one inference server."""
    return Metrics("etude_serve", _COUNTERS, _HISTOGRAMS)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes from its clients. Those of single keys are in the tokens file."""

    body_bytes: int = 32 << 20
    requests: int = 1024
    """Answers sampled or waiting at the same time, of all keys together."""
    answer_s: float = 900.0
    """Longest time of one answer."""
    idle_s: float = 600.0
    """Conversations (`x-session-id`) that nobody goes on with end after it."""
    conversations: int = 1024
    side_channel_s: float = 300.0
    """How long the tokens of an answer can be fetched."""
    side_channel_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request's headers ask of its answer."""

    pin: str | None = None
    """The policy version that each token must come from, by its name; None: any, and it may change."""
    with_tokens: bool = False
    """Whether the tokens are kept for the side channel."""

    def check(self, version: PolicyVersion) -> None:
        """Raises VersionNotServedError for tokens of another version than the one that was asked for."""
        if self.pin is not None and str(version) != self.pin:
            raise VersionNotServedError(
                "this policy version is not, or no longer, in service here",
                field=VERSION_HEADER,
                received=self.pin,
                fix=f"ask for {version}, which is, or leave the header out",
            )


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the engine behind the sampler can tell of itself."""

    gauges: Callable[[], Mapping[str, float]] = dict
    """By metric name, for `/metrics`."""
    failure: Callable[[], BaseException | None] = lambda: None
    """Why it will never answer again; None while it works."""


class ServerState:
    """One server. For one event loop."""

    def __init__(
        self,
        model: ServedModel,
        sampler: Sampler,
        sink: WeightSink,
        keys: Keys | None = None,
        limits: ServerLimits | None = None,
        admin_token: str = "",
        pool: str = "serve",
        engine: EngineView | None = None,
        loans: LoanDesk | None = None,
    ) -> None:
        """`admin_token` opens the routes of weights; empty: nothing does. `pool`: which pool this replica is
        in, for the router. `loans`: lends it to training runs; `sink` is then its `home`."""
        self.model = model
        self.sampler = sampler
        self.sink = sink
        self.keys = keys or Keys({})
        self.limits = limits or ServerLimits()
        self.admin_token = admin_token
        self.pool = pool
        self.engine = engine or EngineView()
        self.metrics = serve_metrics()
        self.frames = ChatFrames(model.shelf) if model.shelf is not None else None
        self.channel = SideChannel(self.limits.side_channel_s, self.limits.side_channel_bytes)
        self.leases = Leases(sampler, self.limits.idle_s, self.limits.conversations)
        self.answering = Answering(sampler, self.leases, pool, self.limits.answer_s)
        self.loans = loans
        self.draining = False
        self.live: set[LiveRequest] = set()
        if loans is not None:
            loans.watch_users(self.until_no_user, self.leases.close)

    def version(self) -> PolicyVersion:
        """The version in service. Raises UnavailableError where requests cannot be answered now."""
        if self.draining:
            raise UnavailableError("the server is about to end", fix="send the request to another replica")
        if (failure := self.engine.failure()) is not None:
            raise UnavailableError("the engine has failed", received=repr(failure), retry_after_s=30)
        if self.loans is not None:
            self.loans.check_home()
        version = self.sink.current()
        if version is None:
            raise UnavailableError(
                "the server has no weights yet", fix="try again, or send it some: POST /admin/weights"
            )
        return version

    def begin(self, answer: ServedAnswer, key: Key, asked: Asked) -> LiveRequest:
        """A request begins. Raises UnavailableError, VersionNotServedError, RateLimitError and
        BadRequestError; then nothing has changed."""
        asked.check(self.version())
        num = len(answer.jobs)
        if self.num_answers + num > self.limits.requests:
            raise UnavailableError("the server is full", received=self.num_answers, retry_after_s=2)
        key.enter(num)
        key.spend(answer.writer.usage.prompt_tokens)
        self.metrics.count("etude_serve_prompt_tokens", answer.writer.usage.prompt_tokens)
        request = LiveRequest(self, answer, key, asked)
        self.live.add(request)
        return request

    async def until_no_user(self) -> None:
        """Waits until no answer is under way."""
        while self.live:
            await next(iter(self.live)).gone.wait()

    @property
    def num_answers(self) -> int:
        """Answers that are sampled or waited for."""
        return sum(request.num_left for request in self.live)

    def load(self) -> dict[str, Any]:
        """Running and waiting answers, and tokens that they may still take: at most."""
        running = sum(request.num_running for request in self.live)
        outstanding = sum(request.outstanding_tokens for request in self.live)
        waiting = self.num_answers - running
        return {"running": running, "waiting": waiting, "outstanding_tokens": outstanding}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request while it is answered: it is measured, charged and recorded as its events pass."""

    state: ServerState
    answer: ServedAnswer
    key: Key
    asked: Asked
    began_s: float = field(default_factory=time.monotonic)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request has ended."""
    _sampled: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens of each answer that has begun."""
    _last_s: dict[int, float] = field(default_factory=dict[int, float])
    _ended: set[int] = field(default_factory=set[int])
    _chunks: list[list[SampleChunk]] = field(init=False)
    """Of each answer, where its tokens are kept for the side channel."""
    _left: bool = False

    def __post_init__(self) -> None:
        self._chunks = [[] for _ in self.answer.jobs]

    @property
    def num_left(self) -> int:
        """Answers that are not complete."""
        return len(self.answer.jobs) - len(self._ended)

    @property
    def num_running(self) -> int:
        """Of these, answers with a token already."""
        return len(self._sampled) - len(self._ended & self._sampled.keys())

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that may still be computed for it: prompts that wait, and what answers may still take."""
        total = 0
        for job in self.answer.jobs:
            if job.index not in self._ended:
                sampled = self._sampled.get(job.index, 0)
                total += job.params.max_tokens - sampled + (0 if sampled else len(job.prompt))
        return total

    async def events(self) -> AsyncGenerator[Event]:
        """Yields the events; closing it early aborts the request. Raises InfrastructureError."""
        metrics = self.state.metrics
        events = self.state.answering.events(self.answer.jobs)
        try:
            async for event in events:
                self._measure(event)
                yield event
            if self.asked.with_tokens:
                found = zip(self.answer.jobs, self._chunks, strict=True)
                body = encode([choice_tokens(job.prompt, chunks) for job, chunks in found])
                self.state.channel.put(self.answer.writer.id, self.key.name, body)
            metrics.observe("etude_serve_request_seconds", time.monotonic() - self.began_s)
        except (GeneratorExit, asyncio.CancelledError):  # the client has left
            metrics.count("etude_serve_aborted")
            raise
        finally:
            self.leave()
            await events.aclose()

    def leave(self) -> None:
        """The request has ended, in whatever way. Idempotent."""
        if not self._left:
            self._left = True
            self.key.leave(len(self.answer.jobs))
            self.state.metrics.count("etude_serve_cached_tokens", self.answer.writer.usage.cached_tokens)
            self.state.live.discard(self)
            self.gone.set()

    def _measure(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._ended.add(event.index)
            return
        assert event.chunk is not None, "what is held back comes with an answer's last tokens"
        if count := len(event.chunk.tokens):
            self.asked.check(event.chunk.version)
            self._measure_tokens(event, count)
        if self.asked.with_tokens:
            self._chunks[event.index].append(event.chunk)

    def _measure_tokens(self, event: Sampled, count: int) -> None:
        metrics, now_s = self.state.metrics, time.monotonic()
        if event.index not in self._sampled:
            metrics.observe("etude_serve_time_to_first_token_seconds", now_s - self.began_s)
        else:
            metrics.observe(
                "etude_serve_inter_token_seconds", (now_s - self._last_s[event.index]) / count, count
            )
        self._last_s[event.index] = now_s
        self._sampled[event.index] = self._sampled.get(event.index, 0) + count
        metrics.count("etude_serve_sampled_tokens", count)
        self.key.spend(count)
