"""Forks of an environment session: copies of its sandbox as it is now or was at an earlier turn.

A fork at an earlier turn starts from the nearest snapshot (or the origin), and the calls since then are
replayed there, so that background commands that ran then run there too; the session itself is not touched.

origin --replay--> turn 3 (snapshot) --replay--> turn 5 = the fork      live: turn 9
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.agent import ToolContext, execute_calls
from etude.agent.tools import Tool
from etude.agent.tools.interface import is_path
from etude.agent.tools.ports import User
from etude.agent.tools.state import ToolState
from etude.environment.history import Difference, History, differences
from etude.environment.origins import begin_step, user_of
from etude.errors import AgentError, ConfigError, InfrastructureError, SandboxError
from etude.kit.tasks import finish_all
from etude.records import Task, ToolCall
from etude.sandbox.errors import LiveProcessesError, Unsupported
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.refusals import check_count
from etude.sandbox.types import SnapshotKind

if TYPE_CHECKING:
    from etude.environment.sessions import EnvironmentSession


@dataclass(slots=True, eq=False)
class SessionSnapshot:
    """A snapshot of a session after `turn` turns, shared by the session and its later forks."""

    turn: int
    snapshot: str
    tool_state: ToolState
    user: User | None
    num_users: int = 1


class Snapshots:
    """The snapshots of one session, taken after every `every` turns that changed something (0: never)."""

    def __init__(self, every: int) -> None:
        self.kept: list[SessionSnapshot] = []
        """In order of turns."""
        self.num_failures = 0
        self._every = every
        self._num_changes = 0
        """Turns that changed something since the last snapshot."""

    def adopt(self, kept: Sequence[SessionSnapshot]) -> None:
        """Shares snapshots of the session that was forked."""
        retain_snapshots(kept)
        self.kept += kept

    async def after_turn(self, turn: int, calls: Sequence[ToolCall], context: ToolContext) -> str | None:
        """Takes a snapshot after `turn` turns if one is due; returns why it failed, or None.

        A failure does not affect the turn: a later fork then replays from further back. While processes of
        the agent run, no snapshot of files alone is taken: sessions that start from it would lack them.
        """
        if not self._every or not may_change(calls, context.tools):
            return None
        self._num_changes += 1
        if self._num_changes < self._every:
            return None
        try:
            kind: SnapshotKind | None = "full" if await live_processes(context) else None
            info = await context.sandbox.create_snapshot(kind)
        except (InfrastructureError, Unsupported, AgentError) as error:
            self.num_failures += 1
            return str(error)
        self._num_changes = 0
        self.kept.append(
            SessionSnapshot(turn, info.id, copy.deepcopy(context.state), copy.deepcopy(context.user))
        )
        return None

    def until(self, turn: int) -> list[SessionSnapshot]:
        """The snapshots taken after `turn` turns or earlier."""
        return [kept for kept in self.kept if kept.turn <= turn]

    async def release(self, backend: SandboxBackend) -> None:
        """Releases the snapshots when the session ends."""
        kept, self.kept = self.kept, []
        await release_snapshots(kept, backend)


async def live_processes(context: ToolContext) -> list[str]:
    """Background commands of the agent that are running in its sandbox. Raises as `Commands.list`."""
    if not context.state.commands:
        return []
    return [one.cmd for one in await context.sandbox.commands.list() if one.running]


def retain_snapshots(kept: Sequence[SessionSnapshot]) -> None:
    """Increments the user count of each."""
    for snapshot in kept:
        snapshot.num_users += 1


async def release_snapshots(kept: Sequence[SessionSnapshot], backend: SandboxBackend) -> None:
    """Decrements the user counts and deletes unused snapshots; tries all, and raises the first error."""
    for one in kept:
        one.num_users -= 1
    await finish_all(backend.delete_snapshot(one.snapshot) for one in kept if one.num_users == 0)


async def replay(context: ToolContext, history: History, first: int, task: Task | None) -> list[Difference]:
    """Replays the turns from `first` on, on a workspace as it was before them; returns what differs.

    Raises InfrastructureError if something failed.
    """
    found: list[Difference] = []
    for number in range(first, len(history.turns)):
        await _redo_after_turn(context.sandbox, history, number, task)
        turn = history.turns[number]
        try:
            results = await execute_calls(turn.calls, context)
        except AgentError as error:
            raise SandboxError(
                f"the sandbox ended in the replay, unlike in the recording: {error.message}",
                field="turn",
                received=number,
            ) from error
        found += differences(number, turn, results)
    await _redo_after_turn(context.sandbox, history, len(history.turns), task)
    return found


async def _redo_after_turn(sandbox: Sandbox, history: History, number: int, task: Task | None) -> None:
    """Repeats what was done between `number` turns and the next one: writes archived contexts (an existing
    file stays the same) and begins steps of the task. Raises SandboxError."""
    for archived in history.archives:
        if archived.turn == number:
            await sandbox.files.write(archived.path, archived.text)
    for place, ended in enumerate(history.steps, start=1):
        if task is not None and ended.turn == number and place < len(task.steps):
            failure = await begin_step(sandbox, task.steps[place])
            if failure is not None:
                raise SandboxError(failure, field="steps")


def may_change(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> bool:
    """Whether one of the calls may have changed the workspace."""
    for call in calls:
        tool = tools.get(call.name)
        if tool is None or call.error is not None:
            continue
        if any(is_path(entry) for entry in tool.access(call.arguments).writes):
            return True
    return False


async def fork_here(
    session: EnvironmentSession, count: int
) -> list[EnvironmentSession | InfrastructureError]:
    """Copies at the present turn, each a session or the error that prevented it. The caller holds the lock.

    Raises LiveProcessesError if they would lack running background commands.
    """
    live = await live_processes(session.context)
    if live and await fidelity_of(session) != "full":
        raise LiveProcessesError(
            "the agent's processes are running, but a fork here copies only files",
            field="fork",
            received=live[0],
            fix="end them first, or use a backend whose forks are full (gvisor, vm)",
        )
    return [
        one
        if isinstance(one, SandboxError)
        else session.branch(one, session.num_turns, session.context.state, session.context.user)
        for one in await session.sandbox.fork(count)
    ]


async def fork_at(
    session: EnvironmentSession, count: int, turn: int
) -> list[EnvironmentSession | InfrastructureError]:
    """Copies of the session after `turn` turns, by replay. Raises ConfigError if there was no such turn."""
    check_count(count)
    if not 0 <= turn <= session.num_turns:
        raise ConfigError(
            "there is no such turn", field="turn", received=turn, fix=f"choose 0 to {session.num_turns}"
        )
    first = await _replayed(session, turn)
    try:
        rest = await fork_here(first, count - 1) if count > 1 else []
    except BaseException:
        await first.close()
        raise
    for fork in rest:
        if not isinstance(fork, InfrastructureError):
            fork.parent, fork.differences = session.id, first.differences
    return [first, *rest]


async def fidelity_of(session: EnvironmentSession) -> str:
    """What a copy of the session's sandbox contains: `full` or `filesystem`; empty if it cannot be copied."""
    return (await session.services.backend.hello()).fork or ""


async def _replayed(session: EnvironmentSession, turn: int) -> EnvironmentSession:
    """A new session in the state of this one after `turn` turns."""
    services, passed = session.services, session.snapshots.until(turn)
    base = passed[-1] if passed else None
    retain_snapshots(passed)
    try:
        if base is None:
            sandbox = await session.origin.make(services.backend, services.life_s)
            state, user = ToolState(), user_of(session.task)
        else:
            sandbox = await services.backend.create(timeout_s=services.life_s, snapshot=base.snapshot)
            state, user = base.tool_state, base.user
        fork = session.branch(sandbox, turn, state, user)
        try:
            found = await replay(fork.context, fork.history, base.turn if base else 0, session.task)
        except BaseException:
            await fork.close()
            raise
        fork.differences = tuple(found)
        return fork
    finally:
        await release_snapshots(passed, services.backend)
