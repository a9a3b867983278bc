"""Drives one session: samples its messages, runs its calls, and reports both back to it.

It waits for the sampler or for tools, never for both, and holds nothing but the session. Cancelling it
aborts the request in flight and closes the session with the sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from etude.agent.execution import execute_calls
from etude.agent.tools.interface import ToolContext
from etude.errors import PrefixMissError, SamplerError
from etude.protocols import Finished, RunCalls, Sample, Sampler, Session
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Status
from etude.sandbox.errors import SandboxKilledByAgentError


@dataclass(frozen=True, slots=True)
class Serving:
    """Which replicas and which policy version serve a session."""

    pool: str = "rollout"
    version: PolicyVersion | None = None
    version_is_minimum: bool = False


@dataclass(slots=True)
class Timings:
    """Wall time of one session by what it waited for, in seconds."""

    sample_s: float = 0.0
    tools_s: float = 0.0


async def run_session(
    session: Session,
    sampler: Sampler,
    context: ToolContext,
    session_id: str,
    rng_key: tuple[int, ...],
    serving: Serving | None = None,
    on_chunk: Callable[[SampleChunk], None] | None = None,
) -> Timings:
    """Runs the session to its end. `on_chunk` sees every chunk as it comes, for display.

    A request's noise key is `rng_key` and the segment's index. An agent that kills its own sandbox ends its
    session with AGENT_ERROR. Retries nothing but a lost prefix, which is sent again whole.

    Raises InfrastructureError (also where a request was aborted from outside); the session then stays as it
    is, and may be run again.
    """
    timings = Timings()
    requests = 0
    sampler.open(session_id)
    try:
        while True:
            action = session.next_action()
            start_s = time.perf_counter()
            match action:
                case Finished():
                    return timings
                case RunCalls():
                    await _run_calls(session, action, context)
                    timings.tools_s += time.perf_counter() - start_s
                case Sample():
                    request = _request(action, f"{session_id}:{requests}", session_id, rng_key, serving)
                    requests += 1
                    await _sample(session, sampler, request, on_chunk)
                    timings.sample_s += time.perf_counter() - start_s
    finally:
        sampler.close(session_id)


async def _run_calls(session: Session, action: RunCalls, context: ToolContext) -> None:
    try:
        results = await execute_calls(action.calls, context)
    except SandboxKilledByAgentError as error:
        session.stop(Status.AGENT_ERROR, error.message)
    else:
        session.on_results(results)


async def _sample(
    session: Session,
    sampler: Sampler,
    request: SampleRequest,
    on_chunk: Callable[[SampleChunk], None] | None,
) -> None:
    """Streams one message into the session."""
    finish: str | None = None
    try:
        async for chunk in sampler.stream(request):
            session.on_chunk(chunk)
            finish = chunk.finish
            if on_chunk is not None:
                on_chunk(chunk)
    except PrefixMissError:
        if request.prefix_digest is None:
            raise
        session.on_prefix_miss()
        return
    except BaseException:
        sampler.abort(request.id)
        raise
    if finish in (None, "abort") and not isinstance(session.next_action(), Finished):
        raise SamplerError(
            "the request ended before the message did", field="chunk.finish", received=finish or "no finish"
        )


def _request(
    sample: Sample, request_id: str, session_id: str, rng_key: tuple[int, ...], serving: Serving | None
) -> SampleRequest:
    serving = serving or Serving()
    return SampleRequest(
        id=request_id,
        session_id=session_id,
        suffix=sample.tokens[sample.known :],
        params=sample.params,
        stop_tokens=sample.stop_tokens,
        rng_key=(*rng_key, sample.segment_index),
        prefix_digest=sample.prefix_digest,
        pool=serving.pool,
        version=serving.version,
        version_is_minimum=serving.version_is_minimum,
    )
