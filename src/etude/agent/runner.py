"""Drives one session: samples its messages, runs its calls, and feeds both back to it.

It waits for the sampler or for tools, never for both, and has no state but the session. Cancellation aborts
the request in flight and closes the session with the sampler; the session stays consistent and may be driven
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from etude.agent.events import CallEnded, CallStarted, ContextOpened, Listener, Retried, Sampled, SessionEnded
from etude.errors import AgentError, InfrastructureError, PrefixMissError, SamplerError
from etude.kit.retry import Backoff
from etude.protocols import Archive, Finished, RunCalls, Sample, Sampler, Session, Workspace
from etude.records import SampleRequest, Status, ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry policy for failures of the sampler."""

    sampler_attempts: int = 1
    """Consecutive failed requests after which the driver gives up. A failed request is sent again whole,
    with the tokens received before it failed: noise depends on positions alone, so the message is the
    same."""
    backoff_s: float = 0.5
    """Pause before the second attempt; doubled each time."""


class CallLog(Protocol):
    """Records the calls of a turn, so that nothing with side effects runs twice."""

    def record_calls(self, calls: tuple[ToolCall, ...]) -> Mapping[int, ToolResult]:
        """Called before a turn runs; returns the results, by position, known from before an interruption."""
        ...

    def record_result(self, position: int, result: ToolResult) -> None:
        """Called when one of its calls has a result."""
        ...


NextMessage = Callable[[], Awaitable[str | None]]
"""Gives the user's next message; None: there is none."""


@dataclass(slots=True)
class Timings:
    """Wall time of one session in seconds, by what it waited for."""

    sample_s: float = 0.0
    tools_s: float = 0.0


async def run_session(
    session: Session,
    sampler: Sampler,
    workspace: Workspace,
    session_id: str,
    rng_key: tuple[int, ...],
    retry_policy: RetryPolicy | None = None,
    listener: Listener | None = None,
    log: CallLog | None = None,
    next_message: NextMessage | None = None,
) -> Timings:
    """Runs the session to its end. `listener` is called with every event. `next_message`: asked for a user
    message whenever the agent is done; None ends the session.

    A request's noise key is `rng_key` and the segment's index. An agent that kills its own sandbox ends its
    session with AGENT_ERROR.

    Raises InfrastructureError (also if a request was aborted from outside); the session then stays as it is,
    and may be run again.
    """
    listener = listener or (lambda event: None)
    retry_policy = retry_policy or RetryPolicy()
    driver = _Driver(
        session, sampler, workspace, session_id, rng_key, retry_policy, listener, log, next_message
    )
    sampler.open(session_id)
    try:
        await driver.run()
    finally:
        sampler.close(session_id)
    end = session.next_action()
    if isinstance(end, Finished):
        listener(SessionEnded(end.status, end.cause))
    return driver.timings


@dataclass(slots=True, eq=False)
class _Driver:
    session: Session
    sampler: Sampler
    workspace: Workspace
    session_id: str
    rng_key: tuple[int, ...]
    retry_policy: RetryPolicy
    listener: Listener
    log: CallLog | None
    next_message: NextMessage | None
    requests: int = 0
    failures: int = 0
    """Consecutive failed requests."""
    timings: Timings = field(default_factory=Timings)

    async def run(self) -> None:
        while True:
            action = self.session.next_action()
            start_s = time.perf_counter()
            match action:
                case Finished(status):
                    if self.next_message is None or status is not Status.DONE:
                        return
                    message = await self.next_message()
                    if message is None:
                        return
                    self.session.on_user(message, by_person=False)
                case RunCalls():
                    await self._run_calls(action)
                    self.timings.tools_s += time.perf_counter() - start_s
                case Archive():
                    await self._archive(action)
                    self.timings.tools_s += time.perf_counter() - start_s
                case Sample():
                    await self._sample(action)
                    self.timings.sample_s += time.perf_counter() - start_s

    async def _run_calls(self, action: RunCalls) -> None:
        known = self.log.record_calls(action.calls) if self.log else {}
        try:
            results = await self.workspace.run_calls(action.calls, known, self._on_call, self._on_result)
        except AgentError as error:
            self.session.stop(Status.AGENT_ERROR, error.message)
        else:
            self.session.on_results(results)

    def _on_call(self, position: int, call: ToolCall) -> None:
        self.listener(CallStarted(position, call))

    def _on_result(self, position: int, call: ToolCall, result: ToolResult) -> None:
        if self.log:
            self.log.record_result(position, result)
        self.listener(CallEnded(position, call, result))

    async def _archive(self, action: Archive) -> None:
        try:
            self.session.on_archived(await self.workspace.archive(action.path, action.text))
        except AgentError as error:
            self.session.stop(Status.AGENT_ERROR, error.message)
            return
        self.listener(ContextOpened(action.path))

    async def _sample(self, action: Sample) -> None:
        """Streams one message into the session."""
        request = self._request(action)
        finish: str | None = None
        try:
            async for chunk in self.sampler.stream(request):
                self.session.on_chunk(chunk)
                finish = chunk.finish
                self.listener(Sampled(chunk, action.summarising))
            if finish in (None, "abort") and not isinstance(self.session.next_action(), Finished):
                raise SamplerError(
                    "the request ended before the message did",
                    field="chunk.finish",
                    received=finish or "no finish",
                )
        except PrefixMissError:
            if request.prefix_digest is None:
                raise
            self.session.on_prefix_miss()
        except SamplerError as error:
            self.sampler.abort(request.id)
            await self._prepare_retry(error)
        except BaseException:
            self.sampler.abort(request.id)
            raise
        else:
            self.failures = 0

    async def _prepare_retry(self, error: InfrastructureError) -> None:
        """Waits before the next attempt; raises the error after the last one."""
        self.failures += 1
        if self.failures >= self.retry_policy.sampler_attempts:
            raise error
        self.session.on_prefix_miss()
        self.listener(Retried(error, self.failures))
        await asyncio.sleep(Backoff(self.retry_policy.backoff_s).pause_s(self.failures))

    def _request(self, sample: Sample) -> SampleRequest:
        number, self.requests = self.requests, self.requests + 1
        return SampleRequest(
            id=f"{self.session_id}:{number}",
            session_id=self.session_id,
            suffix=sample.tokens[sample.known :],
            params=sample.params,
            stop_tokens=sample.stop_tokens,
            rng_key=(*self.rng_key, sample.segment_index),
            prefix_digest=sample.prefix_digest,
        )
