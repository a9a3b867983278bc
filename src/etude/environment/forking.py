"""Forks of an environment session: copies of its sandbox now, or of how it was at an earlier turn.

A fork at an earlier turn starts from the nearest snapshot (or the origin), and the calls since then are run
again there (`branching.replay`), so that background commands that ran then run there too; the session itself
is not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.agent.tools.state import ToolState
from etude.environment.branching import hold, let_go, live_processes, replay
from etude.environment.origins import user_of
from etude.errors import ConfigError, InfrastructureError, SandboxError
from etude.sandbox.errors import LiveProcessesError
from etude.sandbox.refusals import check_count

if TYPE_CHECKING:
    from etude.environment.sessions import EnvironmentSession


async def fork_here(
    session: EnvironmentSession, count: int
) -> list[EnvironmentSession | InfrastructureError]:
    """Copies at the present turn; the caller holds the session still. Each is one, or what prevented it.

    Raises LiveProcessesError where they would lack background commands that run.
    """
    history = session.history
    await _check_processes(session)
    copies = await session.sandbox.fork(count)
    return [
        one
        if isinstance(one, SandboxError)
        else session.branch(
            one,
            history.until(session.num_turns),
            session.context.state,
            session.user,
            session.snapshots.kept,
        )
        for one in copies
    ]


async def fork_at(
    session: EnvironmentSession, count: int, turn: int
) -> list[EnvironmentSession | InfrastructureError]:
    """Copies as it was after `turn` turns, by replay. Raises ConfigError for a turn that there was not."""
    check_count(count)
    if not 0 <= turn <= session.num_turns:
        raise ConfigError(
            "there was no such turn", field="turn", received=turn, fix=f"0 to {session.num_turns}"
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
    """What a copy of the session's sandbox holds: `full`, `filesystem`, or nothing where it cannot be
    copied."""
    return (await session.site.backend.hello()).fork or ""


async def _check_processes(session: EnvironmentSession) -> None:
    live = await live_processes(session.context)
    if live and await fidelity_of(session) != "full":
        raise LiveProcessesError(
            "processes of the agent live, and a fork here copies the files alone",
            field="fork",
            received=live[0],
            fix="end them first, or use a backend whose forks are full (gvisor, vm)",
        )


async def _replayed(session: EnvironmentSession, turn: int) -> EnvironmentSession:
    """The session as it was after `turn` turns, made anew."""
    site, passed = session.site, session.snapshots.until(turn)
    base = passed[-1] if passed else None
    hold(passed)
    try:
        if base is None:
            sandbox = await session.origin.make(site.backend, site.life_s)
            state, user = ToolState(), user_of(session.task)
        else:
            sandbox = await site.backend.create(timeout_s=site.life_s, snapshot=base.snapshot)
            state, user = ToolState.from_dict(base.tool_state), base.user
        fork = session.branch(sandbox, session.history.until(turn), state, user, passed)
        try:
            found = await replay(fork.context, fork.history, base.turn if base else 0, session.task)
        except BaseException:
            await fork.close()
            raise
        fork.differences = tuple(found)
        return fork
    finally:
        await let_go(passed, site.backend)
