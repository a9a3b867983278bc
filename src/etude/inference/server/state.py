"""State of a server: model, sampler, keys, metrics, and the requests in progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.inference.headers import VERSION_HEADER
from etude.inference.server.answering import Job
from etude.inference.server.chat import ServedAnswer, ServedModel
from etude.inference.server.errors import UnavailableError, VersionNotServedError
from etude.inference.server.limits import Key, Keys
from etude.inference.server.loans import LoanDesk
from etude.inference.server.side_channel import SideChannel, choice_tokens, encode
from etude.kit.tasks import end_tasks
from etude.protocols import Sampler, WeightSink
from etude.records import PolicyVersion
from etude.serving.metrics import LATENCY_S, Metrics
from etude.tokens.chat.answers import Ended, Event, Sampled
from etude.tokens.chat.histories import ChatFrames

_REQUEST_S = (*LATENCY_S, 300.0)
"""Histogram buckets (upper bounds) for request latencies."""
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Histogram buckets (upper bounds) for inter-token times."""

_HISTOGRAMS: Mapping[str, tuple[tuple[float, ...], str]] = {
    "etude_serve_time_to_first_token_seconds": (_REQUEST_S, "From the request's arrival to its first token."),
    "etude_serve_inter_token_seconds": (_STEP_S, "From token to token of one answer."),
    "etude_serve_request_seconds": (_REQUEST_S, "From the request's arrival to the end of its answer."),
}
_COUNTERS: Mapping[str, str] = {
    "etude_serve_requests": "Requests that were answered, by endpoint and status.",
    "etude_serve_prompt_tokens": "Tokens of prompts, cached ones included.",
    "etude_serve_cached_tokens": "Tokens of prompts that were not computed again.",
    "etude_serve_sampled_tokens": "Tokens sampled.",
    "etude_serve_aborted": "Requests whose client left before the answer was complete.",
    "etude_serve_engine_failures": "Requests that failed through no fault of their client's.",
    "etude_serve_weight_updates": "Versions put into service.",
}


def serve_metrics() -> Metrics:
    """The metrics of one inference server."""
    return Metrics("etude_serve", _COUNTERS, _HISTOGRAMS)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server. Those of single keys are in the tokens file."""

    body_bytes: int = 32 << 20
    requests: int = 1024
    """Concurrent answers, running or waiting, over all keys."""
    answer_s: float = 900.0
    """Longest time of one answer."""


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options that a request sets by headers."""

    pin: str | None = None
    """Name of the policy version that every token must come from; None: any, and it may change."""
    with_tokens: bool = False
    """Whether to keep the tokens for the side channel."""

    def check(self, version: PolicyVersion) -> None:
        """Raises VersionNotServedError if `version` is not the pinned one."""
        if self.pin is not None and str(version) != self.pin:
            raise VersionNotServedError(
                "this policy version is not in service here",
                field=VERSION_HEADER,
                received=self.pin,
                fix=f"ask for {version}, or omit the header",
            )


class ServerState:
    """State of one server. For one event loop."""

    def __init__(
        self,
        model: ServedModel,
        sampler: Sampler,
        sink: WeightSink,
        keys: Keys | None = None,
        limits: ServerLimits | None = None,
        admin_token: str = "",
        pool: str = "serve",
        loans: LoanDesk | None = None,
        gauges: Callable[[], Mapping[str, float]] = dict,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        """`admin_token`: for the weight and loan routes; empty: they are closed. `pool`: the replica's pool,
        for the router. `loans`: lends it to training runs; `sink` is then its `home`. `gauges`: engine
        metrics by name. `failure`: the error that has ended the engine, or None."""
        self.model = model
        self.sampler = sampler
        self.sink = sink
        self.keys = keys or Keys({})
        self.limits = limits or ServerLimits()
        self.admin_token = admin_token
        self.pool = pool
        self.gauges, self.failure = gauges, failure
        self.metrics = serve_metrics()
        self.frames = ChatFrames(model.renderers) if model.renderers is not None else None
        self.channel = SideChannel()
        self.loans = loans
        self.draining = False
        self.live: set[LiveRequest] = set()
        if loans is not None:
            loans.wait_until_idle = self.wait_until_idle

    def version(self) -> PolicyVersion:
        """The version in service. Raises UnavailableError if requests cannot be answered now."""
        if self.draining:
            raise UnavailableError("the server is shutting down", fix="send the request to another replica")
        if (failure := self.failure()) is not None:
            raise UnavailableError("the engine has failed", received=repr(failure), retry_after_s=30)
        if self.loans is not None:
            self.loans.check_home()
        version = self.sink.current()
        if version is None:
            raise UnavailableError(
                "the server has no weights yet", fix="try again later, or send weights: POST /admin/weights"
            )
        return version

    def begin_request(self, answer: ServedAnswer, key: Key, options: ResponseOptions) -> LiveRequest:
        """Admits a request. Raises UnavailableError, VersionNotServedError, RateLimitError and
        BadRequestError without changing anything."""
        options.check(self.version())
        num = len(answer.jobs)
        if self.num_answers + num > self.limits.requests:
            raise UnavailableError("the server is full", received=self.num_answers, retry_after_s=2)
        key.begin_requests(num)
        key.charge(answer.writer.prompt_tokens)
        self.metrics.count("etude_serve_prompt_tokens", answer.writer.prompt_tokens)
        request = LiveRequest(self, answer, key, options)
        self.live.add(request)
        return request

    async def wait_until_idle(self) -> None:
        """Waits until no request is in progress."""
        while self.live:
            await next(iter(self.live)).finished.wait()

    @property
    def num_answers(self) -> int:
        """Incomplete answers of all requests."""
        return sum(request.num_incomplete for request in self.live)

    def load(self) -> dict[str, Any]:
        """Running and waiting answers, and an upper bound of their outstanding tokens."""
        running = sum(request.num_running for request in self.live)
        outstanding = sum(job.outstanding_tokens for request in self.live for job in request.answer.jobs)
        waiting = self.num_answers - running
        return {"running": running, "waiting": waiting, "outstanding_tokens": outstanding}


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in progress: measures, charges and records its events as they pass.

    jobs --a task each--> sampler --> Sampled ..... Ended
                                          \\____ one queue ____ events()
    """

    state: ServerState
    answer: ServedAnswer
    key: Key
    options: ResponseOptions
    began_s: float = field(default_factory=time.monotonic)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the request has ended."""

    @property
    def num_incomplete(self) -> int:
        """Incomplete answers."""
        return sum(job.ended is None for job in self.answer.jobs)

    @property
    def num_running(self) -> int:
        """Incomplete answers with at least one token."""
        return sum(job.ended is None and job.num_tokens > 0 for job in self.answer.jobs)

    async def events(self) -> AsyncGenerator[Event]:
        """Yields the events of all answers, each ending with an `Ended`. Closing it early aborts the request.

        Raises InfrastructureError if the sampler fails; the answers are then incomplete.
        """
        state, jobs = self.state, self.answer.jobs
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._sample(job, queue)) for job in jobs]
        incomplete = len(jobs)
        try:
            while incomplete:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                incomplete -= isinstance(event, Ended)
                if isinstance(event, Sampled):
                    self._measure(event, jobs[event.index])
                yield event
            if self.options.with_tokens:
                body = encode([choice_tokens(job.prompt, job.chunks) for job in jobs])
                state.channel.put(self.answer.writer.id, self.key.name, body)
            state.metrics.observe("etude_serve_request_seconds", time.monotonic() - self.began_s)
        except (GeneratorExit, asyncio.CancelledError):  # the client has left
            state.metrics.count("etude_serve_aborted")
            raise
        finally:
            try:
                await end_tasks(*tasks)
            finally:
                self.finish()

    async def _sample(self, job: Job, queue: asyncio.Queue[Event | Exception]) -> None:
        """Samples one answer into the queue, which gets an `Ended` or an exception unless cancelled."""
        state = self.state
        try:
            await job.sample(state.sampler, state.pool, state.limits.answer_s, queue.put_nowait)
        except Exception as error:  # raised by `events`
            queue.put_nowait(error)

    def finish(self) -> None:
        """Ends the request, whether complete, failed or aborted. Idempotent."""
        if not self.finished.is_set():
            self.finished.set()
            self.key.end_requests(len(self.answer.jobs))
            self.state.metrics.count("etude_serve_cached_tokens", self.answer.writer.cached_tokens)
            self.state.live.discard(self)

    def _measure(self, event: Sampled, job: Job) -> None:
        assert event.chunk is not None, "text that was held back comes with an answer's last tokens"
        if not (count := len(event.chunk.tokens)):
            return
        self.options.check(event.chunk.version)
        metrics, now_s = self.state.metrics, time.monotonic()
        if job.last_s:
            metrics.observe("etude_serve_inter_token_seconds", (now_s - job.last_s) / count, count)
        else:
            metrics.observe("etude_serve_time_to_first_token_seconds", now_s - self.began_s)
        job.last_s = now_s
        metrics.count("etude_serve_sampled_tokens", count)
        self.key.charge(count)
