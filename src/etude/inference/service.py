"""The engine as a Sampler and a WeightSink for many concurrent sessions in one asyncio process.

    sessions ──stream()──> tickets ──due──> engine.step() ──chunks──> sessions
       ^                                                                 |
       └──────────────── tools, sandboxes, graders <─────────────────────┘

What is computed together decides the last bits of the result, so a reproducible run must not let tools'
wall time decide it. Each time a session leaves the engine (its message is complete) it gets a ticket that
is due a fixed number of steps later. At that step the loop waits until the session has come back (with its
next request, or by closing), and takes it in, in ticket order. Meanwhile other sessions decode, so tools
overlap with sampling and nothing depends on which tool was faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import EtudeError, SamplerError
from etude.inference.engine import Engine
from etude.inference.slots import FinishedRequest
from etude.model.scoring import score_sequences
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest

WeightFetcher = Callable[[WeightManifest], Mapping[str, Tensor]]


@dataclass(slots=True, eq=False)
class _Ticket:
    """A session that is away, and what it comes back with."""

    session_id: str
    due_step: int
    request: SampleRequest | None = None
    answer: asyncio.Future[FinishedRequest] | None = None
    returned: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class StepSums:
    """What engine steps cost, summed so that a regression over all of them needs none of them."""

    gram: NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 4)))
    """Sum of f f^T, where f = (1, decoded tokens, whether it prefilled, prefilled tokens)."""
    moment: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    """Sum of f times the step's seconds."""
    decode_s: float = 0.0
    """Of steps that only decoded."""
    mixed_s: float = 0.0
    """Of steps that did both."""
    mixed_steps: int = 0
    mixed_decode_tokens: int = 0

    def add(self, decode_tokens: int, prefill_tokens: int, elapsed_s: float) -> None:
        """Counts one step in."""
        features = np.array((1.0, decode_tokens, prefill_tokens > 0, prefill_tokens))
        self.gram += np.outer(features, features)
        self.moment += features * elapsed_s
        if decode_tokens and prefill_tokens:
            self.mixed_s += elapsed_s
            self.mixed_steps += 1
            self.mixed_decode_tokens += decode_tokens
        elif decode_tokens:
            self.decode_s += elapsed_s

    def since(self, earlier: StepSums) -> StepSums:
        """The steps that were counted after `earlier`."""
        return StepSums(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(slots=True)
class ServiceTimes:
    """Where the loop's wall time went, in seconds."""

    step_s: float = 0.0
    steps: StepSums = field(default_factory=StepSums)
    waiting_s: float = 0.0
    """Waiting for sessions that were due and still away."""


class EngineService:
    """Drives one engine. Use as an async context manager: the loop runs inside."""

    def __init__(self, engine: Engine, fetch_weights: WeightFetcher, delay_steps: int | None = 6) -> None:
        """`delay_steps`: steps until a session is waited for; None takes requests as they come (for
        interactive use, where reproducible timing means nothing)."""
        self.engine = engine
        self.times = ServiceTimes()
        self._fetch_weights = fetch_weights
        self._delay_steps = delay_steps
        self._clock = 0
        self._tickets: deque[_Ticket] = deque()
        self._away: dict[str, _Ticket] = {}
        self._in_flight: dict[str, str] = {}
        """Session -> its request, from stream() until the answer."""
        self._answers: dict[str, asyncio.Future[FinishedRequest]] = {}
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def __aenter__(self) -> EngineService:
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop_task
        self._failure = SamplerError("the engine was stopped")
        self._fail_waiting(self._failure)

    # ---- Sampler --------------------------------------------------------------------------------

    def open(self, session_id: str) -> None:
        """See Sampler.open."""
        if session_id in self._away or session_id in self._in_flight:
            raise SamplerError("session is open already", field="session_id", received=session_id)
        self._leave(session_id)
        self._wake.set()

    def close(self, session_id: str) -> None:
        """See Sampler.close. A request in flight is aborted."""
        request_id = self._in_flight.get(session_id)
        if request_id is not None:
            self.abort(request_id)
        ticket = self._away.pop(session_id, None)
        if ticket is not None:
            ticket.returned.set()
            self._wake.set()

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream. Chunks come when the message is complete, one per policy version."""
        if self._failure is not None:
            raise SamplerError("the engine has failed", received=repr(self._failure))
        ticket = self._away.pop(request.session_id, None)
        if ticket is None:
            raise SamplerError(
                "session is not open or has a request in flight",
                field="session_id",
                received=request.session_id,
                fix="call open() first, and wait for the last answer",
            )
        self._in_flight[request.session_id] = request.id
        ticket.request = request
        ticket.answer = asyncio.get_running_loop().create_future()
        ticket.returned.set()
        self._wake.set()
        finished = await ticket.answer
        for chunk in finished.chunks:
            yield chunk

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score."""
        current = self.engine.current()
        if version != current:
            raise SamplerError(
                "version is not served", field="version", received=f"{version}; serving {current}"
            )
        return Scores(score_sequences(self.engine.model, [tokens])[0], current)

    def abort(self, request_id: str) -> None:
        """See Sampler.abort."""
        for ticket in self._tickets:
            if ticket.request is not None and ticket.request.id == request_id:
                self._take_back(ticket, ticket.request)
                return
        finished = self.engine.abort(request_id)
        if finished is not None:
            self._deliver(finished)

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage."""
        self.engine.stage(manifest.version, self._fetch_weights(manifest))

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. Runs between two steps, because steps never suspend."""
        self.engine.activate(version, kv)

    def current(self) -> PolicyVersion | None:
        """See WeightSink.current."""
        return self.engine.version

    # ---- the loop -------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._take_in()
                if self.engine.has_work:
                    self._step()
                    await asyncio.sleep(0)
                elif self._tickets:
                    self._clock = max(self._clock, self._tickets[0].due_step)
                    if self._delay_steps is None:
                        await self._wait_for_anyone()
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:
            self._failure = error
            self._fail_waiting(error)
            raise

    async def _wait_for_anyone(self) -> None:
        self._wake.clear()
        if not any(ticket.returned.is_set() for ticket in self._tickets):
            await self._wake.wait()

    async def _take_in(self) -> None:
        """Takes back the sessions that are due, in ticket order, waiting for those still away."""
        if self._delay_steps is None:
            returned = [ticket for ticket in self._tickets if ticket.returned.is_set()]
            self._tickets = deque(ticket for ticket in self._tickets if not ticket.returned.is_set())
            for ticket in returned:
                self._admit(ticket)
            return
        while self._tickets and self._tickets[0].due_step <= self._clock:
            ticket = self._tickets[0]
            began = time.perf_counter()
            while not ticket.returned.is_set():  # an abort may have taken the request back meanwhile
                await ticket.returned.wait()
            self.times.waiting_s += time.perf_counter() - began
            self._tickets.popleft()
            self._admit(ticket)

    def _admit(self, ticket: _Ticket) -> None:
        if ticket.request is None or ticket.answer is None:
            self.engine.close(ticket.session_id)
            return
        if ticket.answer.cancelled():
            self._leave(ticket.session_id)
            return
        try:
            self.engine.submit(ticket.request)
        except EtudeError as error:
            self._leave(ticket.session_id)
            ticket.answer.set_exception(error)
            return
        self._answers[ticket.request.id] = ticket.answer

    def _step(self) -> None:
        began = time.perf_counter()
        counters = self.engine.counters
        decoded, prefilled = counters.decode_tokens, counters.prefill_tokens
        finished = self.engine.step()
        elapsed = time.perf_counter() - began
        self.times.step_s += elapsed
        self.times.steps.add(counters.decode_tokens - decoded, counters.prefill_tokens - prefilled, elapsed)
        self._clock += 1
        for request in finished:
            self._deliver(request)

    def _deliver(self, finished: FinishedRequest) -> None:
        self._leave(finished.request.session_id)
        answer = self._answers.pop(finished.request.id, None)
        if answer is not None and not answer.done():
            answer.set_result(finished)

    def _take_back(self, ticket: _Ticket, request: SampleRequest) -> None:
        """Aborts a request that has not reached the engine: its session is away as before."""
        answer, ticket.request, ticket.answer = ticket.answer, None, None
        ticket.returned.clear()
        self._in_flight.pop(ticket.session_id, None)
        self._away[ticket.session_id] = ticket
        if answer is None or answer.done():
            return
        try:
            answer.set_result(self.engine.give_up(request))
        except SamplerError as error:
            answer.set_exception(error)

    def _leave(self, session_id: str) -> None:
        self._in_flight.pop(session_id, None)
        ticket = _Ticket(session_id, self._due_step())
        self._tickets.append(ticket)
        self._away[session_id] = ticket

    def _due_step(self) -> int:
        """The next multiple of the delay that is at least the delay away: sessions come back in batches,
        so that fewer steps have something to prefill."""
        delay = self._delay_steps or 0
        return -(-(self._clock + delay) // delay) * delay if delay else self._clock

    def _fail_waiting(self, error: BaseException) -> None:
        waiting = [*self._answers.values(), *(t.answer for t in self._tickets if t.answer is not None)]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(SamplerError("the engine failed", received=repr(error)))
        self._answers.clear()
