"""Batched execution of a turn's calls: the results equal those of separate calls, only faster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sandbox.scenes import in_sandbox

from etude.agent import ToolContext, ToolLimits, execute_calls
from etude.agent.execution import Outcome
from etude.agent.tools import Registry, core_registry
from etude.agent.tools.finish import Finish
from etude.agent.tools.interface import Access, Arguments, reads_path, writes_path
from etude.errors import AgentError, InfrastructureError, SandboxError, ToolArgumentError
from etude.records import ToolCall, ToolErrorClass, ToolResult
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.interface import Sandbox
from etude.tokens.grammar import Parameter, ToolSchema


class World:
    """What the tools work on, and what was asked of them."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.groups: list[list[str]] = []
        """The paths of each `read` that was done, alone or together."""
        self.fails: list[Exception] = []
        self.delay_s = 0.0
        self.rng: Random | None = None
        self.unfinished = 0

    async def pause(self) -> None:
        """Takes as long as was asked for, and fails if it is time to."""
        self.unfinished += 1
        try:
            for _ in range(self.rng.randrange(4) if self.rng else 0):
                await asyncio.sleep(0)
            await asyncio.sleep(self.delay_s)
            if self.fails:
                raise self.fails.pop(0)
        finally:
            self.unfinished -= 1

    def look(self, path: str) -> ToolResult:
        """Raises ToolArgumentError for the one path that is wrong."""
        if path == "wrong":
            raise ToolArgumentError("wrong path")
        return ToolResult(self.words.get(path, "nothing"))


class Tool:
    """One that reads or writes words by path."""

    repeatable = True

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.schema = ToolSchema(name, "", (Parameter("path", ""), Parameter("word", "", required=False)))

    def access(self, arguments: Arguments) -> Access:
        return reads_path(arguments) if self.schema.name != "write" else writes_path(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        path = arguments["path"]
        if self.schema.name == "write":
            await self.world.pause()
            self.world.words[path] = self.world.words.get(path, "") + arguments.get("word", "")
        else:
            self.world.groups.append([path])
            await self.world.pause()
        return self.world.look(path)


class TogetherTool(Tool):
    """`read`, whose calls run together."""

    def together(
        self, context: ToolContext
    ) -> Callable[[Sequence[Arguments]], Awaitable[list[Outcome]]] | None:
        async def run(calls: Sequence[Arguments]) -> list[Outcome]:
            paths = [call["path"] for call in calls]
            self.world.groups.append(paths)
            await self.world.pause()
            found: list[Outcome] = []
            for path in paths:
                try:
                    found.append(self.world.look(path))
                except AgentError as error:
                    found.append(error)
            return found

        return run


def stage(world: World, together: bool = True, **options: Any) -> ToolContext:
    kind = TogetherTool if together else Tool
    tools = Registry([kind(world, "read"), Tool(world, "list"), Tool(world, "write"), Finish()])
    options.setdefault("limits", ToolLimits(provider_backoff_s=0.001))
    sandbox: Any = None
    return ToolContext(sandbox, tools, **options)


def read(path: str) -> ToolCall:
    return ToolCall("read", {"path": path})


def write(path: str, word: str) -> ToolCall:
    return ToolCall("write", {"path": path, "word": word})


def play(world: World, *calls: ToolCall, **options: Any) -> list[ToolResult]:
    return asyncio.run(execute_calls(calls, stage(world, **options)))


def test_reads_of_a_turn_run_as_one_and_everything_is_told_in_order() -> None:
    world, told = World(), list[object]()
    calls = [read("a"), read("wrong"), read("a"), ToolCall("read"), ToolCall("zap")]
    results = asyncio.run(
        execute_calls(
            calls,
            stage(world),
            None,
            lambda position, call: told.append(position),
            lambda position, call, result: told.append((position, call, result.error)),
        )
    )
    assert world.groups == [["a", "wrong", "a"]]
    assert [result.output for result in results[:3]] == ["nothing", "error: wrong path", "nothing"]
    assert results[3].output.startswith("error: ") and results[4].output == "error: unknown tool zap"
    wrong = ToolErrorClass.INVALID_ARGUMENTS
    assert told == [0, 1, 2, (0, calls[0], None), (1, calls[1], wrong), (2, calls[2], None)]
    assert all(result.duration_s > 0 for result in results[:3])


def test_what_waits_for_a_write_is_not_read_before_it() -> None:
    world = World()
    world.delay_s = 0.005
    calls = [read("a"), write("b", "1"), read("b"), read("c"), write("a", "2"), read("a"), ToolCall("finish")]
    outputs = [result.output for result in play(world, *calls)]
    assert outputs[:6] == ["nothing", "1", "1", "nothing", "2", "2"]
    assert sorted(world.groups) == [["a"], ["a", "c"], ["b"]]


PATHS = st.sampled_from(["a", "a/b", "b", "b/c", ".", "wrong", "../x"])
CALLS = st.one_of(
    st.builds(read, PATHS),
    st.builds(write, PATHS, st.text(alphabet="xyz", min_size=1, max_size=2)),
    st.builds(lambda path: ToolCall("list", {"path": path}), PATHS),
)


@given(st.lists(CALLS, max_size=8), st.integers(0, 1000))
def test_a_turn_has_the_outcome_of_its_calls_one_after_the_other(calls: list[ToolCall], seed: int) -> None:
    alone, world = World(), World()
    expected = [play(alone, call, together=False)[0] for call in calls]
    world.rng = Random(seed)
    found = play(world, *calls)
    assert [(r.output, r.error) for r in found] == [(r.output, r.error) for r in expected]
    assert world.words == alone.words


def test_more_calls_than_may_run_at_once_run_one_by_one() -> None:
    world = World()
    play(world, *(read(str(number)) for number in range(4)), limits=ToolLimits(parallel_calls=3))
    assert world.groups == [["0"], ["1"], ["2"], ["3"]]


def test_a_call_alone_runs_as_ever() -> None:
    world = World()
    assert play(world, read("a"), write("b", "1"))[0].output == "nothing"
    assert world.groups == [["a"]]


def test_results_that_are_known_are_not_asked_for_again() -> None:
    world, known = World(), ToolResult("known")
    calls = [read("a"), read("b"), read("c")]
    results = asyncio.run(execute_calls(calls, stage(world), {1: known}))
    assert [result.output for result in results] == ["nothing", "known", "nothing"]
    assert world.groups == [["a", "c"]]


def test_nobody_is_asked_about_reads() -> None:
    async def approve(call: ToolCall) -> str | None:
        return "no" if call.name == "write" else "never asked"

    world = World()
    results = play(world, read("a"), write("b", "1"), read("c"), approve=approve)
    assert [result.output for result in results] == ["nothing", "error: no", "nothing"]
    assert world.groups == [["a", "c"]]


def test_a_failing_provider_is_asked_again_for_all_of_them() -> None:
    world = World()
    world.fails += [InfrastructureError("down"), InfrastructureError("down")]
    assert [result.output for result in play(world, read("a"), read("b"))] == ["nothing"] * 2
    assert world.groups == [["a", "b"]] * 3


@pytest.mark.parametrize("error", [SandboxError("gone"), SandboxKilledByAgentError("killed")])
def test_a_dead_sandbox_ends_the_turn_at_once(error: Exception) -> None:
    world = World()
    world.fails.append(error)
    with pytest.raises(type(error)):
        play(world, read("a"), read("b"), write("a", "x"))
    assert world.groups == [["a", "b"]] and not world.words


@pytest.mark.parametrize(
    ("error", "output"),
    [(TimeoutError(), "error: read timed out"), (ToolArgumentError("none of these"), "error: none of these")],
)
def test_what_the_agent_did_wrong_with_all_is_a_result_for_each(error: Exception, output: str) -> None:
    world = World()
    world.fails.append(error)
    assert [result.output for result in play(world, read("a"), read("b"))] == [output] * 2


@pytest.mark.parametrize("others", [[], [write("b", "x")]])
def test_cancelling_a_turn_ends_what_runs_together(others: list[ToolCall]) -> None:
    world = World()
    world.delay_s = 10.0

    async def cancel() -> int:
        calls = [read("a"), read("c"), *others]
        task = asyncio.create_task(execute_calls(calls, stage(world)))
        await asyncio.sleep(0.01)
        assert world.unfinished == 1 + len(others)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return world.unfinished

    assert asyncio.run(cancel()) == 0
    assert not world.words


READS: list[dict[str, str]] = [
    {"path": "a"},
    {"path": "none"},
    {"path": "d"},
    {"path": "../x"},
    {"path": "a", "offset": "2", "limit": "1"},
    {"path": "a", "offset": "99"},
    {"path": "a", "offset": "0"},
    {"path": "a", "offset": "-1"},
    {"path": "binary"},
    {"path": "large"},
    {"path": "empty"},
    {"path": " "},
    {"path": "many", "offset": "150"},
    {"path": "many"},
    {"path": "/workspace/bytes"},
]


def test_read_file_shows_the_same_together_and_alone_in_one_round_trip(tmp_path: Path) -> None:
    files: dict[str, bytes | str] = {
        "a": "one\ntwo\nthree\n",
        "d/e": "",
        "binary": b"a\0b",
        "large": b"x" * ((1 << 20) + 1),
        "empty": "",
        "many": "".join(f"line {number}\n" for number in range(400)) + "x" * 1000,
        "bytes": b"\xff\xfe\n",
    }

    async def scenario(sandbox: Sandbox) -> None:
        context = ToolContext(sandbox, core_registry())
        calls = [ToolCall("read_file", arguments) for arguments in READS]
        alone = [(await execute_calls([call], context))[0] for call in calls]
        line: Any = sandbox
        before = line.channel.next_id()
        together = await execute_calls(calls, context)
        assert line.channel.next_id() == before + 2
        assert [(r.output, r.error, r.facts) for r in together] == [
            (r.output, r.error, r.facts) for r in alone
        ]
        assert len({result.output for result in together}) > 10

    in_sandbox(tmp_path, scenario, files)
