"""The contents of a forked sandbox, on every available backend."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from etude.agent import ToolLimits, core_registry
from etude.agent.tools.registry import Registry
from etude.agent.tools.terminal import Terminal
from etude.environment.fork_groups import ForkedSessions, ForkRefusal, fork_at_turn
from etude.environment.forking import fidelity_of
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.records import ToolCall, ToolResult
from etude.sandbox.errors import LiveProcessesError, PathMissingError
from etude.sandbox.interface import SandboxBackend
from tests.environment.playing import FINISH, MEND, READ, TASK, new_environment, run_episode, scripted
from tests.sandbox.backends import with_backend

FILES_ONLY = ["unisolated", "local"]
FULL = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.foreign]) for name in ("gvisor", "vm")]

COUNT = "n=0; while true; do n=$((n+1)); echo $n > beat.txt; sleep 0.1; done"
START = ToolCall("run_command", {"command": COUNT, "background": "true"})
KILL = ToolCall("run_command", {"id": "1", "kill": "true"})


def with_terminal() -> Registry:
    """The core's tools with the whole terminal in place of the small one."""
    core = core_registry()
    tools = [tool for name, tool in core.items() if name != "run_command"]
    return Registry([*tools, Terminal()])


async def turn(session: EnvironmentSession, *calls: ToolCall) -> Sequence[ToolResult]:
    results = await session.run_calls(calls, {}, _ignore, _ignore)
    assert all(result.error is None for result in results), results
    return results


def _ignore(*event: object) -> None:
    pass


def session_on(backend: SandboxBackend, every: int = 0) -> EnvironmentSession:
    return EnvironmentSession.begin(
        SessionServices(backend, Grader(backend), with_terminal(), ToolLimits(), snapshot_every=every), TASK
    )


async def beats(session: EnvironmentSession, looks: int = 600) -> bool:
    """Whether the background command is at work in this session's sandbox."""
    seen: set[bytes] = set()
    for _ in range(looks):
        with contextlib.suppress(PathMissingError):  # it has yet to write its first
            seen.add(await session.sandbox.files.read("beat.txt"))
        if len(seen) > 1:
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.parametrize("name", FILES_ONLY)
def test_copies_of_files_alone_are_refused_while_a_background_command_runs(name: str) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        session = session_on(backend)
        try:
            await turn(session, MEND)
            await turn(session, START)
            assert await fidelity_of(session) == "filesystem"
            with pytest.raises(LiveProcessesError, match=r"processes are running.*while true.*gvisor, vm"):
                await session.fork(2)
            assert await beats(session), "the refusal has ended nothing"
            await turn(session, KILL)
            (copy,) = await session.fork()
            assert isinstance(copy, EnvironmentSession)
            assert b"return sum(xs)\n" in await copy.sandbox.files.read("lib/tally.py")
            assert not await beats(copy, 20)
            await copy.close()
        finally:
            await session.close()

    with_backend(name, scenario)


@pytest.mark.parametrize("name", FILES_ONLY)
def test_a_session_with_live_processes_is_not_forked_for_a_group_and_goes_on(name: str) -> None:
    """Replay makes the processes again, and copies of that would lack them."""
    told = run_episode(new_environment(), scripted([[READ], [READ], [READ], [FINISH]]))

    async def scenario(backend: SandboxBackend) -> None:
        session = session_on(backend)
        try:
            await turn(session, MEND)
            await turn(session, START)
            assert await fork_at_turn(session, told, 2, 2) is ForkRefusal.LIVE_PROCESSES
            await turn(session, KILL)
            assert await fork_at_turn(session, told, 2, 2) is ForkRefusal.LIVE_PROCESSES
            before = len(await backend.list())
            forked = await fork_at_turn(session, told, 1, 2)
            assert isinstance(forked, ForkedSessions), "before the command began there was none"
            assert forked.origin.fidelity == "filesystem"
            for env_session in forked.made:
                await env_session.close()
            assert len(await backend.list()) == before
        finally:
            await session.close()

    with_backend(name, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES_ONLY)
def test_no_snapshot_of_files_alone_is_taken_while_processes_live(name: str) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        session = session_on(backend, every=1)
        try:
            await turn(session, MEND)
            await turn(session, START)
            assert [kept.turn for kept in session.snapshots.kept] == [1]
            assert session.snapshots.num_failures == 1
            await turn(session, READ)
            (again,) = await session.fork(turn=2)
            assert isinstance(again, EnvironmentSession)
            assert await beats(again), "made again from the snapshot before it, with its process"
            await again.close()
            await turn(session, KILL)
            await turn(session, MEND)
            assert [kept.turn for kept in session.snapshots.kept] == [1, 4, 5]
        finally:
            await session.close()

    with_backend(name, scenario)


@pytest.mark.parametrize("name", FULL)
def test_full_copies_hold_the_processes_which_go_their_own_ways(name: str) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        session = session_on(backend)
        try:
            await turn(session, START)
            assert await fidelity_of(session) == "full"
            copies: list[Any] = await session.fork(2)
            one, two = copies
            assert await beats(one) and await beats(two)
            await turn(one, KILL)
            assert not await beats(one, 20)
            assert await beats(two) and await beats(session)
            for copy in copies:
                await copy.close()
        finally:
            await session.close()

    with_backend(name, scenario)
