"""Environment sessions in this process: turns, grading, pauses, forks, replay."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from etude.agent.journal import INTERRUPTED
from etude.agent.tools import Registry, ToolContext, core_registry
from etude.agent.tools.interface import WRITES_ALL
from etude.environment import origins
from etude.environment.origins import Origin, directory_template, repository_template
from etude.environment.server.session_routes import describe
from etude.environment.sessions import EnvironmentSession
from etude.errors import ConfigError, InfrastructureError, SandboxError, UserError
from etude.records import Status, ToolCall, ToolResult
from etude.sandbox.errors import SandboxKilledByAgentError, SandboxStateError
from etude.sandbox.template import Template
from etude.sandbox.types import SnapshotKind
from etude.tokens.grammar import ToolSchema
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import FINISH, MEND, READ, SPOIL, TASK, TEST
from tests.environment.server.serving import Seen, begin, new_services, turn, until
from tests.fakes.faulty_sandbox import FaultyBackend


class Counting:
    """A tool that counts its calls, and may wait, fail or kill."""

    schema = ToolSchema("count", "counts", ())
    repeatable = False

    def __init__(self) -> None:
        self.num_calls = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []

    def access(self, arguments: Any) -> Any:
        return WRITES_ALL

    async def run(self, arguments: Any, context: ToolContext) -> ToolResult:
        self.num_calls += 1
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        await context.sandbox.files.write("counted.txt", str(self.num_calls))
        return ToolResult(f"call {self.num_calls}")


COUNT = ToolCall("count")


def counting_services(backend: Any = None, **settings: Any) -> tuple[Any, Counting]:
    tool = Counting()
    return new_services(backend, tools=Registry([*core_registry().values(), tool]), **settings), tool


def run(scenario: Any) -> Any:
    return asyncio.run(scenario())


def test_a_solved_session_is_graded_and_leaves_nothing() -> None:
    async def scenario() -> None:
        session = begin()
        for calls in ((READ,), (MEND,), (TEST,), (FINISH,)):
            await turn(session, *calls)
        assert (session.num_turns, session.finished, session.facts.num_edits) == (4, True, 1)
        first, second = await session.submit(), await session.submit()
        assert first is second
        assert (first.status, first.verdict.passed, first.reward.total) == (Status.DONE, True, 1.0)
        with pytest.raises(SandboxStateError, match="submitted"):
            await turn(session, READ)
        await session.close()
        await session.close()
        backend: Any = session.services.backend
        assert not backend.live

    run(scenario)


def test_malformed_calls_and_limits_cost_what_they_cost_in_an_episode() -> None:
    async def scenario() -> None:
        session = begin()
        await turn(session, ToolCall("read_file", error="unclosed path"), READ)
        outcome = await session.submit(Status.LIMIT, "turns")
        assert outcome.reward.task == 0.0
        assert outcome.reward.terms["malformed"] < 0
        assert outcome.reward.terms["limit"] < 0
        await session.close()

    run(scenario)


def test_what_cannot_be_graded_says_why() -> None:
    async def scenario() -> None:
        session = await EnvironmentSession.open(new_services(), Origin(Template({"a.py": "x = 1\n"})))
        with pytest.raises(ConfigError, match="no task"):
            await session.submit()
        await session.close()
        other = begin()
        with pytest.raises(ConfigError, match="never graded"):
            await other.submit(Status.INFRASTRUCTURE)
        await other.close()
        with pytest.raises(SandboxStateError, match="closed"):
            await turn(other, READ)

    run(scenario)


def test_a_failing_grader_is_no_verdict_and_is_asked_again() -> None:
    async def scenario() -> None:
        backend = FaultyBackend(MemoryBackend(), {"probes": 1})
        session = begin(new_services(backend))
        await turn(session, MEND)
        with pytest.raises(SandboxError, match="on purpose"):
            await session.submit()
        assert session.outcome is None
        with pytest.raises(SandboxStateError):
            await turn(session, SPOIL)
        assert (await session.submit()).verdict.passed
        await session.close()
        assert backend.num_killed == backend.num_created

    run(scenario)


def test_a_turn_that_is_asked_for_twice_is_run_once() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        session = begin(services)
        tool.gate.clear()
        one, two = Seen(), Seen()
        first = asyncio.create_task(session.turn([COUNT], 0, one.on_call, one.on_result))
        await until(lambda: tool.num_calls == 1)
        second = asyncio.create_task(session.turn([COUNT], 0, two.on_call, two.on_result))
        await asyncio.sleep(0.01)
        first.cancel()
        tool.gate.set()
        assert [result.output for result in await second] == ["call 1"]
        third = await session.turn([COUNT], 0, one.on_call, one.on_result)
        assert [result.output for result in third] == ["call 1"]
        assert (tool.num_calls, session.num_turns) == (1, 1)
        with pytest.raises(UserError, match="other calls"):
            await session.turn([READ], 0, one.on_call, one.on_result)
        with pytest.raises(UserError, match="skips"):
            await session.turn([READ], 5, one.on_call, one.on_result)
        await session.close()

    run(scenario)


def test_keys_name_turns_too() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        session, seen = begin(services), Seen()
        for _ in range(2):
            await session.turn([COUNT], None, seen.on_call, seen.on_result, key="a")
        await session.turn([COUNT], None, seen.on_call, seen.on_result, key="b")
        assert tool.num_calls == 2
        await session.close()

    run(scenario)


def test_a_turn_that_failed_is_tried_again_without_repeating_side_effects() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        session, seen = begin(services), Seen()
        tool.failures = [InfrastructureError("failed on purpose")]
        with pytest.raises(InfrastructureError, match="on purpose"):
            await session.turn([READ, COUNT, MEND], 0, seen.on_call, seen.on_result)
        assert session.num_turns == 0
        read, counted, mended = await session.turn([READ, COUNT, MEND], 0, seen.on_call, seen.on_result)
        assert read.output.startswith("1\t")
        assert counted.output == INTERRUPTED
        assert mended.output == "ok"
        assert tool.num_calls == 1
        await session.close()

    run(scenario)


def test_what_is_known_of_a_failed_turn_is_not_taken_for_a_later_one() -> None:
    async def scenario() -> None:
        services, tool = counting_services(FaultyBackend(MemoryBackend(), {"read": 1}))
        session = begin(services)
        with pytest.raises(SandboxError):
            await turn(session, COUNT, READ)
        assert (await turn(session, COUNT, READ))[0] == "call 1"
        assert (await turn(session, COUNT, READ))[0] == "call 2"
        assert tool.num_calls == 2
        await session.close()

    run(scenario)


def test_cancelling_the_caller_in_process_ends_the_turn() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        session = begin(services)
        tool.gate.clear()
        running = asyncio.create_task(turn(session, COUNT))
        await until(lambda: tool.num_calls == 1)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        assert not session.busy
        assert (await turn(session, READ))[0].startswith("1\t")
        await session.close()

    run(scenario)


def test_an_agent_that_killed_its_sandbox_has_failed_its_task() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        session = begin(services)
        tool.failures = [SandboxKilledByAgentError("used up the memory")]
        for _ in range(2):
            with pytest.raises(SandboxKilledByAgentError):
                await turn(session, COUNT)
        outcome = await session.submit()
        assert outcome.status is Status.AGENT_ERROR
        assert (outcome.verdict.passed, outcome.verdict.cause) == (False, "used up the memory")
        await session.close()

    run(scenario)


def test_a_paused_session_waits_and_goes_on() -> None:
    async def scenario() -> None:
        session = begin()
        await turn(session, MEND)
        assert await session.pause() == await session.pause() == "filesystem"
        with pytest.raises(SandboxStateError, match="paused"):
            await turn(session, READ)
        await session.resume()
        assert "return sum(xs)\n" in (await turn(session, READ))[0] + "\n"
        await session.close()

    run(scenario)


def test_a_turn_that_is_asked_for_again_during_its_snapshot_hinders_no_later_one() -> None:
    async def scenario() -> None:
        begun, going_on, seen = asyncio.Event(), asyncio.Event(), Seen()
        services, tool = counting_services(snapshot_every=1)
        session = begin(services)
        await session.diff()  # the sandbox is there
        snapshot = session.sandbox.create_snapshot

        async def slowly(kind: SnapshotKind | None = None) -> Any:
            begun.set()
            await going_on.wait()
            return await snapshot(kind)

        session.sandbox.create_snapshot = slowly  # pyright: ignore[reportAttributeAccessIssue]
        first = asyncio.ensure_future(session.turn([COUNT], 0, seen.on_call, seen.on_result))
        await begun.wait()
        again = asyncio.ensure_future(session.turn([COUNT], 0, seen.on_call, seen.on_result))
        following = asyncio.ensure_future(session.turn([COUNT], 1, seen.on_call, seen.on_result))
        await asyncio.sleep(0)
        going_on.set()
        answers = [results[0].output for results in await asyncio.gather(first, again, following)]
        assert answers == ["call 1", "call 1", "call 2"]
        assert (tool.num_calls, session.num_turns) == (2, 2)
        await session.close()

    run(scenario)


def test_a_paused_session_is_graded_once_it_is_awake() -> None:
    async def scenario() -> None:
        session = begin()
        await turn(session, MEND)
        await session.pause()
        with pytest.raises(SandboxStateError, match="paused"):
            await session.submit()
        await session.resume()
        assert (await session.submit()).verdict.passed
        await session.close()

    run(scenario)


@pytest.mark.parametrize("end", ["submit", "close"])
def test_a_session_that_ends_while_it_is_laid_aside_stays_ended(end: str) -> None:
    """Had it been laid aside, it could be woken, and go on with its verdict known."""

    async def scenario() -> None:
        begun, going_on = asyncio.Event(), asyncio.Event()
        session = begin()
        await turn(session, MEND)
        pause = session.sandbox.pause

        async def slowly(kind: SnapshotKind) -> None:
            begun.set()
            await going_on.wait()
            await pause(kind)

        session.sandbox.pause = slowly  # pyright: ignore[reportAttributeAccessIssue]
        pausing = asyncio.ensure_future(session.pause())
        await begun.wait()
        ending = asyncio.ensure_future(session.submit() if end == "submit" else session.close())
        await until(lambda: session.state != "open")
        going_on.set()
        outcome = await ending
        with pytest.raises(SandboxError):
            await pausing
        with pytest.raises(SandboxStateError, match="submitted" if end == "submit" else "closed"):
            await session.resume()
        assert outcome is None or outcome.verdict.passed
        await session.close()

    run(scenario)


def test_the_diff_leaves_the_harness_out() -> None:
    async def scenario() -> None:
        session = begin()
        await turn(session, MEND)
        assert await session.archive(".etude/history/001.md", "what came before") == ""
        changes = await session.diff()
        assert list(changes) == ["lib/tally.py"]
        await session.close()

    run(scenario)


# Forks


def test_forks_go_their_own_ways() -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        session = begin(new_services(backend))
        await turn(session, MEND)
        one, two = await session.fork(2)
        assert isinstance(one, EnvironmentSession)
        assert isinstance(two, EnvironmentSession)
        assert (one.parent, one.parent_turn, one.num_turns) == (session.id, 1, 1)
        await turn(one, SPOIL)
        assert (await two.submit()).verdict.passed
        assert not (await one.submit()).verdict.passed
        assert (await session.submit()).verdict.passed
        for each in (session, one, two):
            await each.close()
        assert not backend.live

    run(scenario)


@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_fork_at_an_earlier_turn_is_as_it_was_then(every: int) -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        services, tool = counting_services(backend, snapshot_every=every)
        session = begin(services)
        await turn(session, READ)
        await turn(session, COUNT)
        await session.archive(".etude/history/001.md", "first")
        await turn(session, MEND)
        await turn(session, COUNT)
        before = tool.num_calls
        (fork,) = await session.fork(turn=3)
        assert isinstance(fork, EnvironmentSession)
        files: Any = await fork.sandbox.files.read("lib/tally.py")
        assert files.endswith(b"return sum(xs)\n")
        assert await fork.sandbox.files.read(".etude/history/001.md") == b"first"
        assert fork.context.state.changed == ["lib/tally.py"]
        assert fork.facts.num_edits == 1
        # `count` answers by how often it was called at all: a replay that runs it again must say so.
        replayed = tool.num_calls - before
        assert [d.position for d in fork.differences] == [0] * replayed
        assert replayed == (0 if every else 1)
        if replayed:
            assert fork.differences[0].expected.output == "call 1"
        await session.close()
        await fork.close()
        assert not backend.live
        assert await backend.list_snapshots() == []

    run(scenario)


def test_many_forks_of_an_earlier_turn_replay_once() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        session = begin(services)
        await turn(session, COUNT)
        await turn(session, COUNT)
        forks = await session.fork(3, turn=1)
        assert len(forks) == 3
        assert tool.num_calls == 3
        assert {getattr(fork, "parent", None) for fork in forks} == {session.id}
        with pytest.raises(ConfigError, match="no such turn"):
            await session.fork(turn=9)
        for fork in (session, *forks):
            assert isinstance(fork, EnvironmentSession)
            await fork.close()

    run(scenario)


def test_a_replay_that_fails_leaves_no_sandbox() -> None:
    async def scenario() -> None:
        services, tool = counting_services()
        session = begin(services)
        await turn(session, COUNT)
        await turn(session, READ)
        tool.failures = [InfrastructureError("failed on purpose")]
        with pytest.raises(InfrastructureError):
            await session.fork(turn=1)
        await session.close()
        backend: Any = services.backend
        assert not backend.live

    run(scenario)


def test_a_snapshot_that_fails_does_not_fail_the_turn() -> None:
    async def scenario() -> None:
        backend = FaultyBackend(MemoryBackend(), {"create_snapshot": 1})
        session = begin(new_services(backend, snapshot_every=1))
        assert await turn(session, MEND) == ["ok"]
        assert describe(session)["snapshot_failures"] == 1
        await session.close()

    run(scenario)


def test_a_session_whose_snapshots_cannot_be_deleted_is_closed_all_the_same() -> None:
    """Whoever watches it would wait for ever."""

    class Keeping(MemoryBackend):
        async def delete_snapshot(self, snapshot: str) -> None:
            raise SandboxError("the host that holds the snapshot is dead")

    async def scenario() -> None:
        session = begin(new_services(Keeping(), snapshot_every=1))
        await turn(session, MEND)
        with pytest.raises(SandboxError, match="is dead"):
            await session.close()
        async with asyncio.timeout(60):
            assert [event["event"] async for event in session.events.watch()][-1] == "closed"

    run(scenario)


# Events


def test_events_can_be_read_again_and_end_with_the_session() -> None:
    async def scenario() -> None:
        session = begin()
        await turn(session, READ, MEND)
        await session.close()
        seen = [event async for event in session.events.watch()]
        kinds = [event["event"] for event in seen]
        assert kinds.count("call_started") == kinds.count("call_ended") == 2
        assert kinds[-2:] == ["turn_ended", "closed"]
        assert [event["n"] for event in seen] == list(range(1, len(seen) + 1))
        later = [event async for event in session.events.watch(after=seen[-2]["n"])]
        assert later == seen[-1:]

    run(scenario)


# Origins


def test_directories_and_commits_come_without_git(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a.py").write_text("old")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "a.py").write_text("new")
    (tmp_path / "link").symlink_to("a.py")
    assert directory_template(tmp_path).contents == {"a.py": b"new"}
    assert asyncio.run(repository_template(tmp_path)).contents == {"a.py": b"old"}
    for commit in ("nothing", "--help", ""):
        with pytest.raises(ConfigError):
            asyncio.run(repository_template(tmp_path, commit))
    with pytest.raises(ConfigError):
        directory_template(tmp_path / "absent")


def test_a_repository_that_git_cannot_read_in_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins, "_GIT_S", 0.0)
    with pytest.raises(ConfigError, match="timed out"):
        asyncio.run(repository_template(tmp_path))


def test_the_task_of_the_tests_has_a_digest_of_its_own() -> None:
    session_origin = Origin(Template(TASK.files, TASK.id))
    assert session_origin.digest == Template(TASK.files, TASK.id).digest
    assert Origin(snapshot="s-1").digest == "s-1"
