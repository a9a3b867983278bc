"""Sessions on a server as workspaces: the same answers, errors of the same types, nothing done twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.agent import AgentSession, JournaledSession, SessionLimits, run_session
from etude.agent.tools.state import ToolState
from etude.environment.wire import task_document, task_of
from etude.errors import InfrastructureError, SandboxError, UserError
from etude.kit.retry import Backoff
from etude.records import Status, Task, ToolCall, TrajectoryId
from etude.sandbox.errors import SandboxKilledByAgentError, SandboxLostError, SandboxMissingError
from etude.sandbox.interface import SandboxBackend
from etude.serving.client import ONCE
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import FINISH, MEND, READ, SOLVES, TASK, TEST, renderer, scripted
from tests.environment.server.serving import (
    TOKEN,
    DroppingTransport,
    Seen,
    new_host,
    new_services,
    remote,
    served,
    turn,
    until,
)
from tests.environment.server.test_sessions import counting_services
from tests.fakes.faulty_sandbox import FaultyBackend
from tests.sandbox.backends import with_backend

from etude.environment.remote import RemoteEnvironment, RemoteSession  # isort: skip
from etude.environment.server import HostLimits  # isort: skip

COUNT = ToolCall("count")
SLOW_S = 60.0

TWICE = Backoff(0.01, attempts=2)


def test_a_session_on_a_server_is_used_like_one_here() -> None:
    async def scenario() -> None:
        async with remote() as server:
            session = await server.create(TASK)
            seen = Seen()
            outputs = await turn(session, ToolCall("x", error="no such"), READ, MEND, TEST, seen=seen)
            assert outputs[0] == "error: no such"
            assert outputs[2:] == ["ok", "1 passed"]
            assert sorted(seen.calls) == sorted(seen.results) == [1, 2, 3]
            assert await session.archive(".etude/history/001.md", "words") == ""
            assert list(await session.diff()) == ["lib/tally.py"]
            assert await session.pause() == "filesystem"
            await session.resume()
            (fork,) = await session.fork(turn=0)
            assert isinstance(fork, RemoteSession)
            assert "- 1" in (await turn(fork, READ))[0]
            outcome = await session.submit(Status.DONE)
            assert (outcome.verdict.passed, outcome.reward.task) == (True, 1.0)
            assert len(await server.list()) == 2
            assert (await server.tools())["digest"]
            await session.close()
            with pytest.raises(SandboxMissingError):
                await session.describe()

    asyncio.run(scenario())


def test_a_task_crosses_with_all_that_grading_takes() -> None:
    assert task_of(task_document(TASK)) == TASK
    assert task_of(task_document(Task("x", "y", {}, user_facts=("a fact.",)))).user_facts == ("a fact.",)


# Lines that break


@pytest.mark.parametrize("times", [1, 3])
def test_a_turn_whose_answer_was_lost_is_not_run_again(times: int) -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        async with served(new_host(services)) as url:
            line = DroppingTransport("/turns", times)
            server = RemoteEnvironment(url, TOKEN, line, backoff=Backoff(0.01, attempts=4))
            session, seen = await server.create(TASK), Seen()
            assert await turn(session, COUNT, READ, seen=seen) == ["call 1", (await turn(session, READ))[0]]
            assert (tool.num_calls, line.num_sent) == (1, times + 2)
            assert sorted(seen.calls) == sorted(seen.results) == [0, 1]
            assert (await session.describe())["turns"] == session.num_turns == 2
            await server.close()

    asyncio.run(scenario())


def test_a_line_that_stays_broken_is_an_infrastructure_failure_and_the_turn_can_be_taken_up() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        async with served(new_host(services)) as url:
            server = RemoteEnvironment(url, TOKEN, DroppingTransport("/turns", 9), backoff=TWICE)
            session = await server.create(TASK)
            with pytest.raises(SandboxLostError, match="environment server"):
                await turn(session, COUNT)
            assert session.num_turns == 0
            other = RemoteEnvironment(url, TOKEN)
            again = await other.connect(session.id, num_turns=0)
            assert await turn(again, COUNT) == ["call 1"]
            assert (await other.connect(session.id)).num_turns == 1
            assert tool.num_calls == 1
            await server.close()
            await other.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_in_mid_turn_finds_the_results_when_it_comes_back() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        async with remote(new_host(services)) as server:
            session = await server.create(TASK)
            tool.gate.clear()
            asking = asyncio.create_task(turn(session, COUNT))
            await until(lambda: tool.num_calls == 1)
            asking.cancel()
            await asyncio.wait({asking})
            tool.gate.set()
            assert await turn(session, COUNT) == ["call 1"]
            assert tool.num_calls == 1

    asyncio.run(scenario())


def test_a_creation_and_a_fork_whose_answers_were_lost_are_made_once() -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        async with served(new_host(new_services(backend))) as url:
            for ending, ask in (("/sessions", "create"), ("/fork", "fork")):
                server = RemoteEnvironment(url, TOKEN, DroppingTransport(ending, 1), backoff=TWICE)
                session = await server.create(TASK)
                if ask == "fork":
                    await session.fork(2)
                await server.close()
            assert len(backend.live) == 4

    asyncio.run(scenario())


# Errors keep their types


def test_errors_arrive_as_what_they_are() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        async with remote(new_host(services)) as server:
            session = await server.create(TASK)
            tool.failures = [SandboxKilledByAgentError("used up the memory")]
            with pytest.raises(SandboxKilledByAgentError, match="memory"):
                await turn(session, COUNT)
            assert (await session.submit()).status is Status.AGENT_ERROR
            other = await server.create(TASK)
            tool.failures = [InfrastructureError("the provider failed")]
            with pytest.raises(InfrastructureError, match="provider failed"):
                await turn(other, COUNT)
            with pytest.raises(UserError, match="no such task"):
                await server.create("absent")
            bare = await server.create(files={"a": "b"})
            with pytest.raises(UserError, match="no task"):
                await bare.submit()

    asyncio.run(scenario())


def test_a_sandbox_that_dies_and_a_grader_that_fails_are_never_rewards() -> None:
    async def scenario() -> None:
        backend = FaultyBackend(MemoryBackend(), {"read": 1, "probes": 1})
        async with remote(new_host(new_services(backend))) as server:
            session = await server.create(TASK)
            with pytest.raises(SandboxError, match="on purpose"):
                await turn(session, READ)
            await turn(session, MEND)
            with pytest.raises(SandboxError, match="on purpose"):
                await session.submit()
            assert (await session.submit()).verdict.passed
        assert backend.num_killed == backend.num_created

    asyncio.run(scenario())


def test_a_full_server_is_asked_again_for_a_turn() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        async with remote(new_host(services, HostLimits(tenant_calls=1))) as server:
            one, two = await server.create(TASK), await server.create(TASK)
            tool.gate.clear()
            first = asyncio.create_task(turn(one, COUNT))
            await until(lambda: tool.num_calls == 1)
            second = asyncio.create_task(turn(two, READ))
            await asyncio.sleep(0.1)
            assert not second.done()
            tool.gate.set()
            await first
            assert (await second)[0].startswith("1\t")

    asyncio.run(scenario())


# The agent on top


def test_a_journaled_session_goes_on_in_its_remote_workspace(tmp_path: Path) -> None:
    async def scenario() -> None:
        services, _ = counting_services()
        async with served(new_host(services)) as url:
            breaking = RemoteEnvironment(url, TOKEN, DroppingTransport("/turns", 99), backoff=ONCE)
            env_session = await breaking.create(TASK)
            session = AgentSession("x", renderer(), TrajectoryId("run", "x", 0, 0, 0), SessionLimits())
            journal = JournaledSession.create(tmp_path / "journal", session, ToolState())
            with pytest.raises(InfrastructureError):
                await run_session(
                    journal, scripted([(READ,), (FINISH,)]), env_session, "s", (1,), log=journal
                )
            sound = RemoteEnvironment(url, TOKEN)
            again = await sound.connect(env_session.id, num_turns=len(journal.session.turns) - 1)
            await run_session(journal, scripted([(READ,), (FINISH,)]), again, "s", (1,), log=journal)
            assert journal.session.status is Status.DONE
            assert (await again.describe())["turns"] == 2
            journal.close()
            await breaking.close()
            await sound.close()

    asyncio.run(scenario())


# A server that dies

_SERVER = """
import sys
from tests.environment.server.serving import new_host, new_services, TOKENS
from tests.environment.server.test_sessions import counting_services
from tests.sandbox.backends import with_backend
from etude.environment.server import serve
site, tool = counting_services()
if sys.argv[1] == "hang":
    tool.gate.clear()
serve(new_host(site), port=0, tokens=TOKENS, drain_s=5)
"""


def start(mode: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, mode],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.readline()
    assert "ready at http://" in said, said
    return process, said.partition(" at ")[2].partition(";")[0].strip()


@pytest.mark.slow
def test_a_server_killed_in_mid_turn_is_an_infrastructure_failure() -> None:
    process, url = start("hang")

    async def scenario() -> None:
        server = RemoteEnvironment(url, TOKEN, backoff=Backoff(0.05, attempts=2))
        session = await server.create(TASK)
        asking = asyncio.create_task(turn(session, COUNT))
        await until(lambda: not asking.done())
        while not (await session.describe())["busy"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="environment server"):
            await asking
        await server.close()

    try:
        asyncio.run(scenario())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_server_that_is_asked_to_end_ends_by_itself() -> None:
    process, url = start("go")

    async def scenario() -> Any:
        server = RemoteEnvironment(url, TOKEN)
        session = await server.create(TASK)
        for calls in SOLVES:
            await turn(session, *(call for call in calls if isinstance(call, ToolCall)))
        outcome = await session.submit()
        await server.close()
        return outcome

    try:
        assert asyncio.run(scenario()).verdict.passed
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=SLOW_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_real_sandboxes_sleep_fork_and_are_graded_behind_the_server() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        host = new_host(new_services(backend, snapshot_every=1))
        async with remote(host) as server:
            session = await server.create(TASK)
            write = ToolCall(
                "run_command", {"command": "date +%s%N > stamp; echo one >> log.txt; cat log.txt"}
            )
            assert await turn(session, write) == ["one"]
            assert await turn(session, write) == ["one\none"]
            await turn(session, MEND)
            assert await session.pause() == "filesystem"
            await session.resume()
            now, early = (await session.fork())[0], (await session.fork(turn=1))[0]
            assert isinstance(now, RemoteSession)
            assert isinstance(early, RemoteSession)
            assert await turn(now, write) == ["one\none\none"]
            assert await turn(early, write) == ["one\none"]
            assert early.described["differences"] == []
            assert sorted(await session.diff()) == ["lib/tally.py", "log.txt", "stamp"]
            ours = {held.session.sandbox.id for held in host.list("one")}
            outcomes = await asyncio.gather(session.submit(), now.submit(), early.submit())
            assert [outcome.verdict.passed for outcome in outcomes] == [True, True, False]
            for each in (session, now, early):
                await each.close()
            # Of these sessions: other tests may use the same state directory at the same time.
            assert len(ours) == 3
            assert not [kept for kept in await backend.list_snapshots() if kept.sandbox_id in ours]
            assert not [left for left in await backend.list() if left.id in ours]

    with_backend("local", scenario)
