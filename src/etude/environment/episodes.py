"""Episodes: one agent, one task, one sandbox, from the user's words to the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.agent import (
    AgentSession,
    Registry,
    SessionLimits,
    SummaryPolicy,
    ToolLimits,
    core_registry,
    run_session,
)
from etude.config import AgentConfig, RewardConfig, RunConfig
from etude.environment.grading import Verdict
from etude.environment.sessions import EnvironmentSession, Site
from etude.environment.verdicts import Grader
from etude.errors import InfrastructureError
from etude.protocols import Sampler
from etude.records import BlobRef, SamplingParams, Status, Task, Trajectory, TrajectoryId
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Resources
from etude.tokens.renderer import Renderer

RouteKeeper = Callable[[NDArray[np.uint8]], BlobRef]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What one episode may use."""

    session: SessionLimits = field(default_factory=SessionLimits)
    summary: SummaryPolicy | None = None
    tools: ToolLimits = field(default_factory=ToolLimits)
    sandbox: Resources = field(default_factory=Resources)
    max_attempts: int = 3
    """Times an episode is begun where the infrastructure fails."""

    @staticmethod
    def from_config(config: RunConfig) -> EpisodeLimits:
        agent, sandbox = config.agent, config.sandbox
        return EpisodeLimits(
            SessionLimits(
                max_turns=agent.max_turns,
                max_calls_per_turn=agent.max_calls_per_turn,
                max_tokens=agent.max_tokens,
                max_message_tokens=agent.max_message_tokens,
                max_session_tokens=agent.max_session_tokens or None,
            ),
            _summary_policy(agent),
            ToolLimits(test_timeout_s=sandbox.test_timeout_s, command_timeout_s=sandbox.command_timeout_s),
            Resources(memory_bytes=sandbox.memory_bytes),
        )


@dataclass(slots=True)
class EnvironmentTimes:
    """Seconds that episodes have spent, summed over episodes that ran side by side."""

    tools_s: float = 0.0
    grade_s: float = 0.0
    num_episodes: int = 0
    num_infrastructure_failures: int = 0


class Environment:
    """Runs episodes. Holds no session: many may run at once in one event loop."""

    def __init__(
        self,
        backend: SandboxBackend,
        renderer: Renderer,
        limits: EpisodeLimits,
        reward: RewardConfig,
        keep_routes: RouteKeeper,
        registry: Registry | None = None,
    ) -> None:
        self.times = EnvironmentTimes()
        self._site = Site(
            backend, Grader(backend, limits.sandbox), registry or core_registry(), limits.tools, reward
        )
        self._renderer = renderer
        self._limits = limits
        self._keep_routes = keep_routes

    async def run(
        self,
        task: Task,
        identity: TrajectoryId,
        sampler: Sampler,
        rng_key: tuple[int, ...],
        params: SamplingParams,
        training: bool = False,
    ) -> Trajectory:
        """One episode. Infrastructure failures are retried from the start, and at last reported as such.

        When summaries are asked for varies in `training` only.
        """
        summary = self._limits.summary
        if summary is not None and not training:
            summary = replace(summary, jitter=0.0)
        attempt = 0
        while True:
            session = AgentSession(
                task.instruction, self._renderer, identity, self._limits.session, params, summary=summary
            )
            try:
                trajectory = await self._attempt(task, session, sampler, rng_key, attempt)
            except InfrastructureError as error:
                self.times.num_infrastructure_failures += 1
                attempt += 1
                if attempt == self._limits.max_attempts:
                    return _failed(session, error, attempt)
            else:
                self.times.num_episodes += 1
                return trajectory

    async def _attempt(
        self, task: Task, session: AgentSession, sampler: Sampler, rng_key: tuple[int, ...], attempt: int
    ) -> Trajectory:
        world = EnvironmentSession.begin(self._site, task, self._limits.sandbox)
        try:
            session_id = f"{session.trajectory_id}~{attempt}"
            timings = await run_session(session, sampler, world, session_id, rng_key)
            outcome = await world.submit(session.status, session.cause)
        finally:
            await asyncio.shield(world.close())
        self.times.tools_s += timings.tools_s
        self.times.grade_s += world.grade_s
        trajectory = session.trajectory(
            self._keep_routes,
            outcome.reward,
            attempt,
            world.origin.digest,
            {"sample_s": timings.sample_s, "tools_s": timings.tools_s, "grade_s": world.grade_s},
        )
        return replace(trajectory, facts=_facts(trajectory, outcome.verdict))


def _summary_policy(agent: AgentConfig) -> SummaryPolicy | None:
    if not agent.summary_at_tokens:
        return None
    return SummaryPolicy(
        at_tokens=agent.summary_at_tokens,
        max_summary_tokens=agent.max_summary_tokens,
        jitter=agent.summary_jitter,
        max_summaries=agent.max_summaries,
        request=agent.summary_request,
    )


def _facts(trajectory: Trajectory, verdict: Verdict) -> dict[str, Any]:
    """What the session did, with what the verdict adds: was the first edit the whole fix?"""
    facts = dict(trajectory.facts)
    right_at_once = bool(facts["first_edit_right"]) or (verdict.passed and facts["num_edits"] == 1)
    return facts | {
        "passed": verdict.passed,
        "verdict": verdict.cause,
        "first_edit_right": right_at_once,
        "sampled_tokens": trajectory.num_sampled_tokens,
    }


def _failed(session: AgentSession, error: InfrastructureError, num_attempts: int) -> Trajectory:
    """A session that we failed, at whatever point: no reward, whatever its own state was."""
    cause = f"{type(error).__name__}: {error}"
    session.stop(Status.INFRASTRUCTURE, cause)
    trajectory = session.trajectory(attempt=num_attempts - 1)
    return replace(trajectory, status=Status.INFRASTRUCTURE, cause=cause)
