"""Episodes of a foreign agent: a command in the task's sandbox that samples from this run's endpoint.

    command in the sandbox --> agent routes --> LiveSessions --> the run's sampler
    (its own loop and tools)                           |            (live weights)
    exits, or is killed at its limit --> graded as any session --> Trajectory with the sampler's own tokens

What the agent does wrong is an outcome. A failure before the first sampled token is no decision of the
model's, so it counts as an infrastructure failure and the episode is retried: a command that is not found, a
program that does not reach the endpoint.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import time
from dataclasses import replace

from etude.agent import AgentSession
from etude.agent.recording import KeepRoutes
from etude.config import HarnessConfig, RewardConfig
from etude.environment.episodes import Environment, EpisodeLimits
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.recording.live import LiveSessions, RecordedSession
from etude.environment.recording.spec import SamplingDefaults, SessionSpec
from etude.environment.runners import EpisodeRequest
from etude.environment.sessions import EnvironmentSession
from etude.errors import AgentError, SamplerError, SandboxError
from etude.protocols import Sampler
from etude.records import Status, Task, ToolResult, Trajectory
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import CommandResult
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.renderer import Renderer

MODEL = "etude"
_SAID_CHARS = 300
"""Length of a command's last output in the cause of its end."""
_ABORTED = ("exit 133", "exit 134")
"""Beginning of the cause if a program aborted itself."""
_Ending = tuple[Status, str]
"""(status, cause) of an agent's session; the cause is empty if the agent itself ended it."""


class HarnessEnvironment(Environment):
    """Runs episodes of a foreign agent, in this process. Implements TimedEpisodeRunner."""

    def __init__(
        self,
        backend: SandboxBackend,
        renderer: Renderer,
        limits: EpisodeLimits,
        reward: RewardConfig,
        keep_routes: KeepRoutes | None,
        harness: HarnessConfig,
        sessions: LiveSessions,
        url: str,
        reach: tuple[str, ...],
    ) -> None:
        """`sessions`: those of the endpoint, which programs in a sandbox reach at `url`. `reach`: the hosts
        that they need for it, as in `Network.allow`."""
        super().__init__(backend, renderer, limits, reward, keep_routes)
        self._harness = harness
        self._sessions = sessions
        self._url, self._reach = url, reach
        cpu_s = math.ceil(harness.timeout_s) * (os.cpu_count() or 1)
        self._resources = replace(limits.sandbox, cpu_s=max(limits.sandbox.cpu_s, cpu_s))
        self._places = asyncio.Semaphore(harness.max_running)

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        """See EpisodeRunner.play; sampling parameters are the request's, whatever the agent requests."""
        assert request.plan is None, "sessions of a foreign agent cannot be forked"

        async def attempt(unused: AgentSession, number: int) -> ForkedEpisode:
            async with self._places:
                return ForkedEpisode(await self._attempt(request, sampler, number))

        return await self._until_done(request, attempt)

    async def _attempt(self, request: EpisodeRequest, sampler: Sampler, number: int) -> Trajectory:
        fixed = replace(request.params, max_tokens=self._limits.session.max_message_tokens)
        sampling = SamplingDefaults(fixed, fixed.max_tokens, own_noise=True)
        session = self._sessions.open(
            SessionSpec(request.identity, sampling=sampling), sampler, request.rng_key
        )
        env_session = EnvironmentSession.begin(self._services, request.task, self._resources, self._reach)
        began = time.perf_counter()
        try:
            try:
                status, cause = await self._play(request.task, session, env_session)
            finally:
                await asyncio.shield(self._sessions.end(session))
            harness_s = time.perf_counter() - began
            _check_sampled(session, cause)
            for turn in session.map.turns():
                # The agent has no results for malformed calls.
                results = [*turn.results, *(ToolResult("") for _ in turn.calls)][: len(turn.calls)]
                env_session.facts.on_turn(turn.calls, results)
            env_session.facts.finished = status is Status.DONE and not cause  # by itself, without a failure
            outcome = await env_session.submit(status, cause)
            self.times.grade_s += env_session.grade_s
            session.reward = outcome.reward
            trajectory = session.trajectory(status, cause, self._keep_routes)
            trajectory = replace(
                trajectory,
                attempt=number,
                image_digest=env_session.origin.digest,
                timings={"harness_s": harness_s, "grade_s": env_session.grade_s},
                facts={**trajectory.facts, **env_session.facts.to_dict()},
            )
            return self._with_verdict(trajectory, outcome.verdict)
        finally:
            await asyncio.shield(env_session.close())

    async def _play(self, task: Task, session: RecordedSession, env_session: EnvironmentSession) -> _Ending:
        """Runs the command to its end, once for each step; the first failure is the result of the session.

        Raises SandboxError if our machinery failed.
        """
        status, cause = await self._run_command(task.at_step(0), session, env_session)
        for number in range(1, len(task.steps)):
            if status is not Status.DONE or await env_session.next_step() is None:
                break
            latest, why = await self._run_command(task.at_step(number), session, env_session)
            status, cause = latest, why or cause
        return status, cause

    async def _run_command(
        self, task: Task, session: RecordedSession, env_session: EnvironmentSession
    ) -> _Ending:
        command = self._harness.command.replace("{instruction}", shlex.quote(task.instruction))
        limit_s = self._harness.timeout_s
        if task.machine is not None and task.machine.agent_s:
            limit_s = min(limit_s, task.machine.agent_s)
        try:
            result = await env_session.sandbox.commands.run(
                command, limit_s, self._environment(task, session)
            )
        except AgentError as error:
            return Status.AGENT_ERROR, error.message
        return _ending_of(result)

    def _environment(self, task: Task, session: RecordedSession) -> dict[str, str]:
        """Environment variables of the command. HOME is the image's, or at least not the workspace, where
        settings would count as the agent's changes."""
        base = f"{self._url}/s/{session.id}"
        has_image = task.machine is not None and not task.machine.is_host
        return {
            **({} if has_image else {"HOME": "/tmp"}),
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": session.key,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": session.key,
            "ETUDE_INSTRUCTION": task.instruction,
            "ETUDE_TASK": task.id,
        }


def _ending_of(result: CommandResult) -> _Ending:
    if result.timed_out:
        return Status.LIMIT, "time"
    said = (result.stderr.strip() or result.stdout.strip())[-_SAID_CHARS:]
    return Status.DONE, f"exit {result.exit_code}: {said}" if result.exit_code else ""


def _check_sampled(session: RecordedSession, cause: str) -> None:
    """Raises SamplerError if requests remained unanswered, SandboxError if nothing was sampled."""
    if session.map.counts.failed:
        raise SamplerError("the agent's requests were not answered", received=session.map.counts.failed)
    if session.map.num_sampled_tokens:
        return
    received, refusal = cause or "it ended by itself", session.refusal
    fix = "run it in a sandbox by hand: it must ask the endpoint that OPENAI_BASE_URL names"
    if received.startswith(_ABORTED):
        fix = "raise sandbox.memory_bytes: the program ended itself, as some do that get no more memory"
    if refusal is not None:
        received = f"{received}; its last request was refused: {refusal}"
        fix = "have it send what the endpoint answers"
    if isinstance(refusal, ContextLengthError):
        fix = f"raise agent.max_tokens, which is {refusal.max_tokens}: its first request has more tokens"
    raise SandboxError(
        "the harness never had an answer of the model",
        field="agent.harness.command",
        received=received,
        fix=fix,
    )
