"""Forks of stored trajectories: sessions with the same tokens up to a turn, and another continuation.

trajectory --replay--> session after turn N -+-> sampled to its end with a model, graded    (sample_fork)
               calls repeated in a sandbox   +-> a journal and a directory, for a person    (create_session)
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from etude.agent import AgentSession, JournaledSession, run_session
from etude.agent.tools.state import HARNESS_DIRECTORY
from etude.controller.agent.folders import SessionFolder, sessions_directory
from etude.controller.agent.models import ModelChoice, open_policy
from etude.controller.replaying import check_turn, open_environment_session, recorded_session
from etude.controller.stored import Stored
from etude.environment.fork_groups import renamed
from etude.environment.replay import Replay, Replayer, check_replayable, replay_session
from etude.environment.sessions import EnvironmentSession
from etude.errors import ConfigError
from etude.kit.durable import whole_directory
from etude.records import Task, Trajectory


@dataclass(frozen=True, slots=True)
class Fork:
    """Where and how to fork. `turn`: number of the agent's messages that are kept."""

    turn: int
    choice: ModelChoice
    task: Task
    """The trajectory's: see `find_task`."""
    backend: str | None = None
    seed: int = 1
    """Seed of the continuation's sampling noise."""
    temperature: float | None = None
    """None: the trajectory's."""


@dataclass(frozen=True, slots=True)
class ForkedSession:
    """A fork as a session of `etude agent`, for a person to continue."""

    session: str
    """Id for `etude agent --resume`."""
    directory: Path
    replay: Replay


async def sample_fork(stored: Stored, fork: Fork) -> tuple[Trajectory, Replay]:
    """Samples the fork to its end, and grades it; returns it with the report of the replay.

    Raises ConfigError for a turn at which the session had ended, UserError for a trajectory that cannot be
    made a session, InfrastructureError.
    """
    _check(stored, fork)
    async with (
        open_policy(fork.choice, True) as policy,
        open_environment_session(stored, fork.task, fork.backend, policy.registry) as env_session,
    ):
        session = recorded_session(stored, fork.task, policy.renderer)
        replay = await _replay_to(stored, fork, session, env_session, None)
        if fork.temperature is not None:
            session.params = replace(session.params, temperature=fork.temperature)
        identity = stored.trajectory.id
        session.on_prefix_miss()
        # Longer than a rollout's key: so the noise differs from any rollout's, whatever the seed.
        key = (fork.seed, identity.group, identity.index, fork.turn)
        timings = await run_session(
            session,
            policy.sampler_for(lambda event: None, fork.turn) if policy.sampler_for else policy.sampler,
            env_session,
            f"{identity}+{fork.turn}",
            key,
            retry_policy=policy.retry_policy,
            next_message=env_session.next_step,
        )
        status = session.status
        assert status is not None, "run_session ended without an end"
        outcome = await env_session.submit(status, session.cause)
        trajectory = session.trajectory(
            None,
            outcome.reward,
            image_digest=env_session.origin.digest,
            timings={
                "sample_s": timings.sample_s,
                "tools_s": timings.tools_s,
                "grade_s": env_session.grade_s,
            },
        )
    renamed_id = replace(identity, run=f"{identity.run}+fork{fork.turn}")
    facts = {"passed": outcome.verdict.passed, "forked_from": str(identity), "forked_at": fork.turn}
    return renamed(trajectory, renamed_id, facts), replay


async def create_session(stored: Stored, fork: Fork, directory: Path) -> ForkedSession:
    """Writes the fork as a session of `etude agent`: its journal, and the workspace in `directory`.

    The directory must not exist, or be empty. Raises as `sample_fork`, and then leaves no files.
    """
    _check(stored, fork)
    directory = _check_directory(directory)
    task, choice = fork.task, fork.choice.to_dict()
    folder: SessionFolder | None = None
    try:
        async with (
            open_policy(fork.choice, True) as policy,
            open_environment_session(stored, task, fork.backend, policy.registry) as env_session,
        ):
            session = recorded_session(stored, task, policy.renderer)
            folder = SessionFolder.create(sessions_directory(), directory, choice, "ask")
            made = JournaledSession.create(folder.journal, session, env_session.context.state)
            with contextlib.closing(made) as journal:
                replay = await _replay_to(stored, fork, session, env_session, journal)
            files = await _workspace_files(env_session, task)
        folder.update(test_paths=tuple(task.test_paths))
        folder.add_prompt(task.instruction, 0)
        _write(directory, files)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    if len(session.contexts) > 1:
        replay.notes.append(f"the history of full contexts ({HARNESS_DIRECTORY}/) is not handed over")
    return ForkedSession(folder.meta.id, directory, replay)


def _check(stored: Stored, fork: Fork) -> None:
    """Checks whatever can be checked before anything is created."""
    check_turn(stored.trajectory, fork.turn, first=0)
    check_replayable(stored.trajectory, fork.turn)


async def _replay_to(
    stored: Stored,
    fork: Fork,
    session: AgentSession,
    env_session: EnvironmentSession,
    journal: JournaledSession | None,
) -> Replay:
    """Replays `session` up to the fork's turn. Raises ConfigError if it had ended there."""
    replayer = Replayer(env_session, env_session.context, next_step=env_session.next_step)
    replay = await replay_session(stored.trajectory, session, replayer, fork.turn, journal)
    if session.status is not None:
        ended = f"{session.status.value}{f' ({session.cause})' if session.cause else ''}"
        raise ConfigError(
            f"the session had ended after this turn: {ended}",
            field="--turn",
            received=fork.turn,
            fix="fork it at an earlier turn",
        )
    return replay


def _check_directory(directory: Path) -> Path:
    """The directory as an absolute path. Raises ConfigError if something is there."""
    directory = directory.resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            "exists already and is not an empty directory",
            field="--into",
            received=str(directory),
            fix="name a new directory",
        )
    return directory


async def _workspace_files(env_session: EnvironmentSession, task: Task) -> dict[str, bytes]:
    """The current files of the workspace, without the harness's own."""
    files = {path: text.encode() for path, text in task.files.items()}
    for path, data in (await env_session.diff()).items():
        if data is None:
            files.pop(path, None)
        elif "__pycache__" not in path.split("/"):
            files[path] = data
    return files


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files; the directory appears atomically. Raises ConfigError."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with whole_directory(directory, sync=False) as whole:
            for path, data in files.items():
                target = whole / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", field="--into", received=str(directory)
        ) from error
