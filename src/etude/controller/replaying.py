"""Replays stored trajectories: recreates their task and sandbox, and repeats their tool calls.

A run stores its configuration, of which its tasks are a function; so a trajectory's task is recreated from
its id, and checked against the digest of the files with which it began. Tasks of other origin are given as
Harbor directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from etude.agent import (
    AgentSession,
    Registry,
    agent_format,
    core_registry,
    full_registry,
    open_renderer,
    registry_of,
)
from etude.agent.index.opening import run_indexes
from etude.config import RewardConfig, RunConfig
from etude.controller.backends import open_checked_backend, open_run_backend
from etude.controller.families import open_family
from etude.controller.stored import Stored, run_tokenizer
from etude.controller.task_sets import read_with_images
from etude.environment.episodes import EpisodeLimits
from etude.environment.origins import task_template
from etude.environment.replay import Replay, Replayer, check_replayable, replay_session, replay_turns
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.errors import ConfigError, TaskError, UserError
from etude.records import Task, Trajectory
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer

_NUMBER = re.compile(r"-(\d{1,9})$")
_SPLIT = re.compile(r"(?:eval|trail)-([a-z_]+)-")


def check_turn(trajectory: Trajectory, turn: int, first: int = 1) -> None:
    """Raises ConfigError for a turn that the trajectory does not have."""
    last = len(trajectory.turns)
    if not first <= turn <= last:
        raise ConfigError(
            "no such turn", field="--turn", received=turn, fix=f"give a number from {first} to {last}"
        )


def find_task(stored: Stored, directory: Path | None = None) -> Task:
    """The task of a trajectory: read from a Harbor directory, or recreated as its run made it. Not to be
    called in an event loop.

    Raises TaskError where it cannot be made, or differs from the original.
    """
    trajectory = stored.trajectory
    if directory is None:
        task = _made_task(stored)
    else:
        (task,) = read_with_images([directory], stored.config or RunConfig())
    digest = task_template(task).digest
    if trajectory.image_digest and digest != trajectory.image_digest:
        raise TaskError(
            "the task's files differ from those that the trajectory started with",
            field="task" if directory is None else "--task",
            received=task.id,
            fix="use the commit that made the run, or name the task's own directory with --task",
        )
    return task


def _made_task(stored: Stored) -> Task:
    identity, config = stored.trajectory.id, stored.config
    number, split = _NUMBER.search(identity.task), _SPLIT.match(identity.task)
    if config is not None and number is not None:
        family, index = open_family(config), int(number[1])
        task = family.source()(index)
        if task.id == identity.task:
            return task
        if split is not None:
            with contextlib.suppress(ConfigError):
                task = family.evaluation_tasks(split[1], index + 1)[index]
            if task.id == identity.task:
                return task
    raise TaskError(
        "is not a task that its run generates" if config else "the trajectory's task is unknown",
        field="task",
        received=identity.task,
        fix="name its Harbor directory with --task DIR",
    )


def recorded_session(stored: Stored, task: Task, renderer: Renderer) -> AgentSession:
    """A new session in the trajectory's initial state. Raises ConfigError for another tokenizer."""
    trajectory, config = stored.trajectory, stored.config
    first = trajectory.segments[0]
    for name, recorded, digest in (
        ("tokenizer", first.tokenizer_digest, renderer.tokenizer.digest),
        ("template and tools", first.template_digest, renderer.template_digest),
    ):
        if recorded != digest:
            raise ConfigError(
                f"the trajectory was recorded with another one ({recorded[:12] or 'unknown'})",
                field=name,
                received=digest[:12],
                fix="name with --run the run that recorded it, or a model that was trained from it",
            )
    limits = EpisodeLimits() if config is None else EpisodeLimits.from_config(config)
    jittered = limits.summary
    plain = None if jittered is None else replace(jittered, jitter=0.0)
    sessions = [
        AgentSession(
            task.instruction, renderer, trajectory.id, limits.session, first.sampling, summary=summary
        )
        for summary in (jittered, plain)
    ]
    return next((s for s in sessions if s.harness_digest == trajectory.harness_digest), sessions[0])


@contextlib.asynccontextmanager
async def open_environment_session(
    stored: Stored, task: Task, backend: str | None, registry: Registry
) -> AsyncIterator[EnvironmentSession]:
    """Opens a new environment session on the task, as the run made them; closes it at exit.

    Raises ResourceError if sandboxes are not available, ConfigError for an unknown backend.
    """
    config = stored.config
    limits = EpisodeLimits() if config is None else EpisodeLimits.from_config(config)
    reward = RewardConfig() if config is None else config.rl.reward
    if backend is not None or config is None:
        opened = open_checked_backend(backend or "local")
    else:
        opened = open_run_backend(config.sandbox)
    try:
        grader = Grader(opened, limits.sandbox, reward=reward)
        indexes = None if config is None else run_indexes(config.agent.index)
        servers = {} if config is None else config.agent.mcp
        services = SessionServices(opened, grader, registry, limits.tools, reward, indexes, servers)
        env_session = EnvironmentSession.begin(services, task, limits.sandbox)
        try:
            yield env_session
        finally:
            await asyncio.shield(env_session.close())
            if indexes is not None:
                await indexes.close()
    finally:
        await asyncio.shield(opened.close())


async def replay_stored(stored: Stored, task: Task, backend: str | None, turns: int | None = None) -> Replay:
    """Repeats the tool calls of a trajectory in a new sandbox of its task, up to turn `turns`.

    Raises ConfigError for a turn that it does not have, SandboxError if the sandbox failed.
    """
    if turns is not None:
        check_turn(stored.trajectory, turns)
    registry, tokenizer = full_registry(), None
    if stored.run is not None:
        registry, tokenizer = core_registry(), run_tokenizer(stored.run)
        if tokenizer is not None:
            agent = stored.run.config.agent
            registry = registry_of(agent_format(tokenizer, agent).tools, agent.mcp)
    session, reason = _session_of_chain(stored, task, tokenizer)
    async with open_environment_session(stored, task, backend, registry) as env_session:
        replayer = Replayer(env_session, env_session.context, next_step=env_session.next_step)
        if session is None:
            replay = await replay_turns(stored.trajectory, replayer, turns)
        else:
            replay = await replay_session(stored.trajectory, session, replayer, turns)
    if reason:
        replay.notes.append(reason)
    return replay


def _session_of_chain(
    stored: Stored, task: Task, tokenizer: Tokenizer | None
) -> tuple[AgentSession | None, str]:
    """The session of a trajectory of several contexts, whose former ones were files that the agent may have
    read. None, with a note of the reason, where it cannot be made; the calls are then repeated without it.
    """
    if len(stored.trajectory.segments) == 1 or stored.run is None:
        return None, ""
    try:
        check_replayable(stored.trajectory)
        if tokenizer is None:
            return None, "the run has no tokenizer"
        return recorded_session(stored, task, open_renderer(tokenizer, stored.run.config.agent)), ""
    except UserError as error:
        return None, str(error)
