"""The engine as a Sampler and a WeightSink for many concurrent sessions in one asyncio process.

    sessions ──stream()──> tickets ──due──> engine.step() ──chunks──> sessions
       ^                                                                 |
       └──────────────── tools, sandboxes, graders <─────────────────────┘

The composition of a batch affects the last bits of its results, so in a reproducible run it must not depend
on tools' wall time. Each time a request ends, its session gets a ticket that is due a fixed number of steps
later. At that step the loop waits until the session has returned (with its next request, or by closing), and
admits it, in ticket order. Meanwhile other sessions decode, so tools overlap with sampling and nothing
depends on which tool was faster.

Without such a schedule (for interactive use) steps run in a thread of their own, so that a long one does not
keep the process from answering. Accesses to the engine then wait for the end of the step: requests are
admitted and sessions closed by the loop anyway, between two steps; aborts are deferred until then. Scoring
runs in a thread in either case, between two steps (`scorer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import EtudeError, SamplerError
from etude.inference.engine import Engine
from etude.inference.requests import already_open, not_open
from etude.inference.scorer import Scorer
from etude.inference.sequences import Answer
from etude.inference.tickets import Reply, Ticket, TicketQueue
from etude.inference.times import EngineLoad, ServiceTimes
from etude.inference.turns import EngineTurns
from etude.kit.tasks import finish_in_thread
from etude.protocols import KvPolicy, Pace
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest
from etude.weights.manifest import digest_base

WeightFetcher = Callable[[WeightManifest], Mapping[str, Tensor]]

_MOST_STEPS = 64
"""Most steps of one engine call, which takes as many as end within about a millisecond."""


class EngineService:
    """Drives one engine. Use as an async context manager: the loop runs inside. Implements
    PacedSampler and WeightSink."""

    def __init__(self, engine: Engine, fetch_weights: WeightFetcher, delay_steps: int | None = 6) -> None:
        """`delay_steps`: steps after which a session's next request is waited for; None admits requests on
        arrival (for interactive use, where timing need not be reproducible), and steps in a thread."""
        self.engine = engine
        self.counters = engine.counters
        self.times = ServiceTimes()
        self.fetch = fetch_weights
        """Fetches and checks the tensors of a manifest from the engine's weight source. Blocks."""
        self._delay_steps = delay_steps
        self._tickets = TicketQueue(delay_steps)
        self._in_flight: dict[str, str] = {}
        """Session -> its request, from stream() until the last answer."""
        self._replies: dict[str, Reply] = {}
        """Request -> its reply, once the engine has it."""
        self._turns = EngineTurns(own_thread=delay_steps is None)
        self._scorer = Scorer(engine, self._turns, at_once=delay_steps is not None)
        self._closing: set[str] = set()
        """Sessions to close once their request has ended."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        """Set while no session is open and the engine has no work."""
        self._idle.set()
        self._staging = asyncio.Lock()
        self._may_step = asyncio.Event()
        """Cleared while weights are staged under a reproducible schedule: no step may run."""
        self._may_step.set()
        self._pace: Pace | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        """The error that ended the loop; None while it runs."""

    async def __aenter__(self) -> EngineService:
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
        finally:
            await self._turns.close()
        self.failure = SamplerError("the engine was stopped")
        self._fail_waiting(self.failure)

    # ---- Sampler --------------------------------------------------------------------------------

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open. `sibling` is ignored unless that session is open without a request in flight."""
        if session_id in self._tickets or session_id in self._in_flight:
            raise already_open(session_id)
        if sibling is None or not self._tickets.issue_after(session_id, sibling):
            self._issue_ticket(session_id)
        self._wake.set()

    def close(self, session_id: str) -> None:
        """See Sampler.close. A request in flight is aborted."""
        request_id = self._in_flight.get(session_id)
        if request_id is not None:
            self.abort(request_id)
            if session_id in self._in_flight:
                self._closing.add(session_id)
                return
        if self._tickets.mark_returned(session_id):
            self._wake.set()

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream. Chunks come when the message is complete, one per policy version; if the
        request is `streaming`, after each step. A stream that is not read to its end aborts its request;
        so does `deadline_s`, counted from this call."""
        if self.failure is not None:
            raise SamplerError("the engine has failed", received=repr(self.failure))
        reply = Reply(request)
        if not self._tickets.mark_returned(request.session_id, reply):
            raise not_open(request.session_id)
        self._in_flight[request.session_id] = request.id
        self._wake.set()
        deadline: asyncio.TimerHandle | None = None
        if request.deadline_s is not None:
            deadline = asyncio.get_running_loop().call_later(request.deadline_s, self.abort, request.id)
        try:
            while True:
                item = await reply.items.get()
                if not isinstance(item, Answer):
                    raise item
                for chunk in item.chunks:
                    yield chunk
                if item.is_last:
                    return
        finally:
            if deadline is not None:
                deadline.cancel()
            if not reply.is_closed:
                reply.is_closed = True
                self.abort(request.id)
                await self._turns.wait_until_free()

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score, and `Scorer`."""
        if self.failure is not None:
            raise SamplerError("the engine has failed", received=repr(self.failure))
        return await self._scorer.score(tokens, version)

    def abort(self, request_id: str) -> None:
        reply = self._tickets.withdraw(request_id)
        if reply is not None:
            self._abort_unstarted(reply)
        else:
            self._turns.when_free(functools.partial(self._abort_begun, request_id))

    def _abort_begun(self, request_id: str) -> None:
        finished = self.engine.abort(request_id)
        if finished is not None:
            self._deliver(finished)

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest, tensors: Mapping[str, Tensor] | None = None) -> None:
        """See WeightSink.stage. Fetching, checks and copies run in a thread, while the engine
        continues. `tensors`: those of the manifest, if the caller has them already.

        Under a reproducible schedule no step runs meanwhile: their number must not depend on how long the
        thread takes. If cancelled, returns once the thread is done.
        """
        async with self._staging:
            if self._delay_steps is not None:
                self._may_step.clear()
            began = time.perf_counter()
            try:
                await finish_in_thread(self._stage, manifest, tensors)  # two at once would mix versions
            finally:
                self.times.stage_s += time.perf_counter() - began
                self._may_step.set()

    def _stage(self, manifest: WeightManifest, tensors: Mapping[str, Tensor] | None) -> None:
        tensors = self.fetch(manifest) if tensors is None else tensors
        self.engine.stage(manifest.version, tensors, digest_base(manifest))

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. Runs between two steps, while nothing is being scored."""
        async with self._scorer.weights_lock:
            await self._turns.wait_until_free()
            began = time.perf_counter()
            self.engine.activate(version, kv)
            elapsed = time.perf_counter() - began
        self.times.swap_s += elapsed
        self.times.longest_swap_s = max(self.times.longest_swap_s, elapsed)

    def current(self) -> PolicyVersion | None:
        return self.engine.version

    # ---- memory ---------------------------------------------------------------------------------

    async def release_memory(self) -> None:
        """See Engine.release_memory. Waits for sessions that are being closed."""
        async with self._scorer.weights_lock:
            if not self._tickets.any_outstanding and not self._in_flight and self.failure is None:
                await self._idle.wait()
            await self._turns.wait_until_free()
            self.engine.release_memory()

    # ---- PacedSampler ---------------------------------------------------------------------------

    def set_pace(self, pace: Pace | None) -> bool:
        self._pace = pace if self._delay_steps is not None else None
        return self._pace is not None

    # ---- for metrics ----------------------------------------------------------------------------

    def usage(self) -> dict[str, float]:
        """Counters and times by their names in EngineCounters and ServiceTimes."""
        times = {name: value for name, value in asdict(self.times).items() if isinstance(value, float)}
        return {**asdict(self.counters), **times}

    @property
    def load(self) -> EngineLoad:
        """Current load of the engine, approximately while a thread has it. Requests whose tickets are not due
        yet count as waiting."""
        engine = self.engine
        num_early = sum(ticket.reply is not None for ticket in self._tickets)
        return EngineLoad(
            engine.num_running, engine.num_waiting + num_early, engine.num_free_pages, engine.num_pages
        )

    # ---- the loop -------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._may_step.wait()
                await self._admit_due()
                await self._may_step.wait()
                if self.engine.has_work:
                    await self._step()
                    await asyncio.sleep(0)
                elif self._tickets:
                    self._tickets.skip_to_due()
                    if self._delay_steps is None:
                        await self._wait_for_return()
                else:
                    self._wake.clear()
                    self._idle.set()
                    await self._wait_for_work()
        except Exception as error:
            self.failure = error
            self._fail_waiting(error)
            raise

    async def _wait_for_return(self) -> None:
        self._wake.clear()
        if not any(ticket.returned.is_set() for ticket in self._tickets):
            await self._wait_for_work()

    async def _wait_for_work(self) -> None:
        async with self._scorer.idle():
            await self._wake.wait()

    async def _admit_due(self) -> None:
        """Admits the sessions that are due, in ticket order, waiting for those that have not returned."""
        if self._delay_steps is None:
            await self._turns.wait_until_free()
            for ticket in self._tickets.pop_returned():
                self._admit(ticket)
            return
        some_ended = False
        while (ticket := self._tickets.due) is not None:
            began = time.perf_counter()
            # An abort may have withdrawn the request meanwhile, and a scoring may have the engine.
            while not (ticket.returned.is_set() and self._turns.is_free):
                await ticket.returned.wait()
                await self._may_step.wait()
                await self._turns.wait_until_free()
            self.times.waiting_s += time.perf_counter() - began
            self._tickets.pop_due()
            self._admit(ticket)
            if self._pace is not None and ticket.reply is None:
                self._pace.on_session_ended(ticket.session_id)
                some_ended = True
        if some_ended and self._pace is not None:
            await self._pace.before_next_step()

    def _admit(self, ticket: Ticket) -> None:
        reply = ticket.reply
        if reply is None:
            self.engine.close(ticket.session_id)
            return
        try:
            self.engine.submit(reply.request)
        except EtudeError as error:
            self._issue_ticket(ticket.session_id)
            reply.put(error)
            return
        self._replies[reply.request.id] = reply

    async def _step(self) -> None:
        """Runs one step, in the thread if there is one. Deferred actions run before the next."""
        counters = self.engine.counters
        most_steps = self._tickets.steps_until_due or _MOST_STEPS
        decoded, prefilled, before = counters.decode_tokens, counters.prefill_tokens, counters.steps

        def work() -> tuple[list[Answer], float]:
            began = time.perf_counter()
            return self.engine.step(most_steps), time.perf_counter() - began

        take_turn = self._turns.run_in_thread if self._delay_steps is None else self._turns.run_in_loop
        answers, elapsed = await take_turn(work)
        taken = max(1, counters.steps - before)
        decoded, prefilled = counters.decode_tokens - decoded, counters.prefill_tokens - prefilled
        self.times.step_s += elapsed
        self.times.steps.add(decoded, prefilled, elapsed, taken)
        self._tickets.clock += taken
        for answer in answers:
            self._deliver(answer)
        self._turns.run_deferred()
        self._scorer.on_step()

    def _deliver(self, answer: Answer) -> None:
        reply = self._replies.get(answer.request.id)
        if answer.is_last:
            self._issue_ticket(answer.request.session_id)
            self._replies.pop(answer.request.id, None)
        if reply is not None:
            reply.put(answer)

    def _abort_unstarted(self, reply: Reply) -> None:
        """Aborts a request that has not reached the engine: its session keeps its ticket."""
        self._in_flight.pop(reply.request.session_id, None)
        try:
            reply.put(self.engine.abort_unstarted(reply.request))
        except SamplerError as error:
            reply.put(error)

    def _issue_ticket(self, session_id: str) -> None:
        self._in_flight.pop(session_id, None)
        self._tickets.issue(session_id)
        self._idle.clear()
        if session_id in self._closing:
            self._closing.discard(session_id)
            self._tickets.mark_returned(session_id)

    def _fail_waiting(self, error: BaseException) -> None:
        waiting = [*self._replies.values(), *(t.reply for t in self._tickets if t.reply is not None)]
        for reply in waiting:
            reply.put(SamplerError("the engine failed", received=repr(error)))
        self._replies.clear()
        self._scorer.stop(error)
        self._idle.set()
        if self._pace is not None:
            self._pace.on_schedule_ended()
