"""Episodes: one agent on one task in one sandbox, from the instruction to the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from etude.agent import (
    AgentSession,
    Registry,
    RetryPolicy,
    SessionLimits,
    SummaryPolicy,
    ToolLimits,
    open_renderer,
    registry_of,
    run_session,
)
from etude.agent.index.opening import run_indexes
from etude.agent.recording import KeepRoutes
from etude.agent.runner import Timings
from etude.config import AgentConfig, RewardConfig, RunConfig
from etude.environment.fork_groups import (
    ForkedEpisode,
    ForkedSessions,
    ForkPlan,
    ForkRefusal,
    SiblingSpec,
    branch_of,
    choose_turn,
    fork_at_turn,
)
from etude.environment.grading import Verdict
from etude.environment.member import MemberSampler
from etude.environment.replay import ReplayHandler, replay_session
from etude.environment.rewards import check_reward, measure_effort, with_length
from etude.environment.runners import EnvironmentTimes, EpisodeRequest, EpisodeRunner
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.errors import InfrastructureError
from etude.kit.tasks import end_tasks, finish_all
from etude.protocols import Sampler
from etude.records import Status, Trajectory
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Resources
from etude.tokens.pieces import Piece
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode."""

    session: SessionLimits = field(default_factory=SessionLimits)
    summary: SummaryPolicy | None = None
    tools: ToolLimits = field(default_factory=ToolLimits)
    sandbox: Resources = field(default_factory=Resources)
    max_attempts: int = 3
    """Most attempts at an episode when the infrastructure fails."""

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
            SummaryPolicy(
                at_tokens=agent.summary_at_tokens,
                max_summary_tokens=agent.max_summary_tokens,
                jitter=agent.summary_jitter,
                max_summaries=agent.max_summaries,
                request=agent.summary_request,
            )
            if agent.summary_at_tokens
            else None,
            ToolLimits(
                read_lines=agent.read_lines,
                test_failures=agent.test_failures,
                test_timeout_s=sandbox.test_timeout_s,
                command_timeout_s=sandbox.command_timeout_s,
            ),
            Resources(memory_bytes=sandbox.memory_bytes),
        )


class Environment(EpisodeRunner):
    """Runs episodes in this process. Implements TimedEpisodeRunner.

    Has no state per session: many may run concurrently in one event loop.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        renderer: Renderer,
        limits: EpisodeLimits,
        reward: RewardConfig,
        keep_routes: KeepRoutes | None,
        registry: Registry | None = None,
        system: str | tuple[Piece, ...] | None = None,
        retry_policy: RetryPolicy | None = None,
        agent: AgentConfig | None = None,
    ) -> None:
        """`registry`: by default the tools that the renderer offers. `system`: replaces the renderer's system
        message. `retry_policy`: for failures of the sampler; by default none. `agent`: configures the code
        index and MCP servers of sessions. Raises MissingPackageError for an index that needs another
        package."""
        self.times = EnvironmentTimes()
        check_reward(reward)
        grader = Grader(backend, limits.sandbox, reward=reward)
        servers = agent.mcp if agent is not None else {}
        tools = registry or registry_of(renderer.grammar.tools, servers)
        indexes = run_indexes(agent.index) if agent is not None else None
        self._services = SessionServices(backend, grader, tools, limits.tools, reward, indexes, servers)
        self.renderer = renderer
        """Renders the sessions."""
        self._limits = limits
        self._keep_routes = keep_routes
        self._system, self._retry_policy = system, retry_policy

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        tokenizer: Tokenizer,
        backend: SandboxBackend,
        limits: EpisodeLimits,
        keep_routes: KeepRoutes | None,
    ) -> Environment:
        """The environment of a run: renderer, tools, index and MCP servers as in its section `agent`.

        Raises ConfigError, MissingPackageError.
        """
        renderer = open_renderer(tokenizer, config.agent)
        return cls(backend, renderer, limits, config.rl.reward, keep_routes, agent=config.agent)

    async def close(self) -> None:
        """Closes the code indexes, after every episode has ended. The caller closes the backend."""
        if self._services.indexes is not None:
            await self._services.indexes.close()

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        """See EpisodeRunner.play. Failures of siblings are reported as such; earlier ones are retried."""

        async def attempt(session: AgentSession, number: int) -> ForkedEpisode:
            # A forked session is held open until its siblings are open: which sessions are batched together
            # must not depend on how long copies of a sandbox take.
            own_view = None if request.plan is None else MemberSampler(sampler, defers_close=True)
            env_session = EnvironmentSession.begin(self._services, request.task, self._limits.sandbox)
            try:
                timings = await run_session(
                    session,
                    own_view or sampler,
                    env_session,
                    f"{request.identity}~{number}",
                    request.rng_key,
                    retry_policy=self._retry_policy,
                    next_message=env_session.next_step,
                )
                if request.plan is None or own_view is None:
                    return ForkedEpisode(await self._graded(session, env_session, timings, number))
                return await self._fork(
                    request, request.plan, session, env_session, timings, number, own_view, sampler
                )
            finally:
                if own_view is not None:
                    own_view.end()
                await asyncio.shield(env_session.close())

        return await self._until_done(request, attempt)

    async def _until_done(
        self, request: EpisodeRequest, attempt: Callable[[AgentSession, int], Awaitable[ForkedEpisode]]
    ) -> ForkedEpisode:
        """The result of the first attempt without an infrastructure failure, or the last one's failure."""
        number = request.first_attempt
        while True:
            session = self._new_session(request)
            try:
                done = await attempt(session, number)
            except InfrastructureError as error:
                self.times.num_infrastructure_failures += 1
                number += 1
                if number >= self._limits.max_attempts:
                    return ForkedEpisode(_failed(session, error, number))
            else:
                self.times.num_episodes += 1
                return done

    def _new_session(self, request: EpisodeRequest) -> AgentSession:
        summary = self._limits.summary
        if summary is not None and not request.training:
            summary = replace(summary, jitter=0.0)
        return AgentSession(
            request.task.instruction,
            self.renderer,
            request.identity,
            self._limits.session,
            request.params,
            self._system,
            summary,
        )

    async def _fork(
        self,
        request: EpisodeRequest,
        plan: ForkPlan,
        session: AgentSession,
        env_session: EnvironmentSession,
        timings: Timings,
        attempt: int,
        own_view: MemberSampler,
        sampler: Sampler,
    ) -> ForkedEpisode:
        source = session.trajectory()
        chosen = choose_turn(source, plan.turn, plan.rng_key)
        if not isinstance(chosen, ForkRefusal):
            chosen = await fork_at_turn(env_session, source, chosen, len(plan.siblings))
        if isinstance(chosen, ForkRefusal):
            own_view.end()
            return ForkedEpisode(await self._graded(session, env_session, timings, attempt), refused=chosen)
        views = [MemberSampler(sampler, defers_close=False) for _ in plan.siblings]
        running: list[asyncio.Task[Trajectory]] = []
        names = [f"{place.identity}~{attempt}" for place in plan.siblings]
        try:
            for name, view in zip(names, views, strict=True):
                view.open(name, f"{request.identity}~{attempt}")
            own_view.end()
            places = zip(plan.siblings, names, chosen.sessions, views, strict=True)
            running += [
                asyncio.create_task(self._sibling(request, source, chosen, *place)) for place in places
            ]
            trajectory = await self._graded(session, env_session, timings, attempt)
            siblings = [await one for one in running]
        finally:
            await asyncio.shield(_end(running, views, chosen))
        return ForkedEpisode(trajectory, tuple(siblings), chosen.origin)

    async def _sibling(
        self,
        request: EpisodeRequest,
        source: Trajectory,
        forked: ForkedSessions,
        place: SiblingSpec,
        name: str,
        env_session: EnvironmentSession | InfrastructureError,
        view: MemberSampler,
    ) -> Trajectory:
        """Continues from the fork to its own grade. The trajectory reports an infrastructure failure."""
        session = self._new_session(request)
        try:
            await replay_session(source, session, ReplayHandler(request.task), forked.turn)
            if isinstance(env_session, InfrastructureError):
                raise env_session
            timings = await run_session(
                session, view, env_session, name, place.rng_key, next_message=env_session.next_step
            )
            trajectory = await self._graded(session, env_session, timings, 0)
            self.times.num_episodes += 1
        except InfrastructureError as error:
            self.times.num_infrastructure_failures += 1
            trajectory = _failed(session, error, 1)
        finally:
            view.end()
            if isinstance(env_session, EnvironmentSession):
                await asyncio.shield(env_session.close())
        facts = {
            "forked_from": str(source.id),
            "forked_at": forked.turn,
            "fork_prefix_tokens": forked.origin.offset,
            "fork_cached_tokens": view.num_cached,
            "fork_fidelity": forked.origin.fidelity,
        }
        return branch_of(trajectory, forked.origin, place.identity, facts)

    async def _graded(
        self, session: AgentSession, env_session: EnvironmentSession, timings: Timings, attempt: int
    ) -> Trajectory:
        """Grades a session that has ended; returns its trajectory with the reward."""
        outcome = await env_session.submit(session.status, session.cause)
        self.times.tools_s += timings.tools_s
        self.times.grade_s += env_session.grade_s
        trajectory = session.trajectory(
            self._keep_routes,
            outcome.reward,
            attempt,
            env_session.origin.digest,
            {"sample_s": timings.sample_s, "tools_s": timings.tools_s, "grade_s": env_session.grade_s},
        )
        return self._with_verdict(trajectory, outcome.verdict)

    def _with_verdict(self, trajectory: Trajectory, verdict: Verdict) -> Trajectory:
        """Adds facts that depend on the verdict, such as whether the first edit was the whole fix, and the
        price of its length, which depends on its tokens."""
        facts = dict(trajectory.facts)
        right_at_once = bool(facts["first_edit_right"]) or (verdict.passed and facts["num_edits"] == 1)
        facts |= {
            "passed": verdict.passed,
            "verdict": verdict.cause,
            "first_edit_right": right_at_once,
            "sampled_tokens": trajectory.num_sampled_tokens,
        }
        reward, length = trajectory.reward, self._services.reward.length
        if reward is not None and length.weight != 0:
            effort = measure_effort(trajectory, self.renderer)
            reward, facts["effort"] = with_length(reward, effort, length), asdict(effort)
        return replace(trajectory, reward=reward, facts=facts)


async def _end(
    running: Sequence[asyncio.Task[Trajectory]], views: Sequence[MemberSampler], forked: ForkedSessions
) -> None:
    """Ends siblings that have not ended themselves, including those cancelled before they began."""
    await end_tasks(*running)
    for view in views:
        view.end()
    await finish_all(one.close() for one in forked.made)


def _failed(session: AgentSession, error: InfrastructureError, num_attempts: int) -> Trajectory:
    """The trajectory of a session that the infrastructure failed: no reward, whatever its own state was."""
    cause = f"{type(error).__name__}: {error}"
    session.stop(Status.INFRASTRUCTURE, cause)
    trajectory = session.trajectory(attempt=num_attempts - 1)
    return replace(trajectory, status=Status.INFRASTRUCTURE, cause=cause)
