import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent import ToolContext, ToolLimits, execute_calls
from etude.agent.tools import Access, Registry
from etude.agent.tools.finish import Finish
from etude.agent.tools.interface import BARRIER, WRITES_ALL, reads_path, writes_path
from etude.errors import InfrastructureError, SandboxError, ToolArgumentError, UserAbortedError
from etude.records import ToolCall, ToolErrorClass, ToolResult
from etude.sandbox.errors import PathMissingError, SandboxKilledByAgentError
from etude.tokens.grammar import Parameter, ToolSchema

QUICK = ToolLimits(provider_backoff_s=0.001)


@dataclass
class Step:
    """A tool over a dict: `read` shows what a path holds, `write` adds a word to it."""

    name: str
    world: dict[str, str]
    log: list[tuple[str, str]]
    repeatable: bool = True
    fails: list[Exception] = field(default_factory=list)
    delay_s: float = 0.0
    running: int = 0
    most: int = 0

    @property
    def schema(self):
        return ToolSchema(self.name, "", (Parameter("path", ""), Parameter("word", "", required=False)))

    def access(self, arguments):
        return reads_path(arguments) if self.name == "read" else writes_path(arguments)

    async def run(self, arguments, context):
        path, word = arguments["path"], arguments.get("word", "")
        self.log.append(("begin", word or path))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            if self.fails:
                raise self.fails.pop(0)
            if self.name == "write":
                self.world[path] = self.world.get(path, "") + word
            return ToolResult(self.world.get(path, "nothing"))
        finally:
            self.running -= 1
            self.log.append(("end", word or path))


class Stage:
    """The tools `read`, `write` and `finish` over one dict."""

    def __init__(self, **context):
        self.world, self.log = {}, []
        self.read, self.write = (Step(name, self.world, self.log) for name in ("read", "write"))
        tools = Registry([self.read, self.write, Finish()])
        context.setdefault("limits", QUICK)
        self.context = ToolContext(None, tools, **context)  # pyright: ignore[reportArgumentType]

    async def play(self, *calls):
        return await execute_calls(calls, self.context)

    def outputs(self, *calls):
        return [result.output for result in asyncio.run(self.play(*calls))]


def read(path):
    return ToolCall("read", {"path": path})


def write(path, word):
    return ToolCall("write", {"path": path, "word": word})


def test_calls_that_do_not_conflict_run_together():
    stage = Stage()
    stage.read.delay_s = stage.write.delay_s = 0.05
    assert stage.outputs(read("a"), read("a"), write("b", "x"), write("c/d", "y")) == ["nothing"] * 2 + [
        "x",
        "y",
    ]
    assert [what for what, _ in stage.log] == ["begin"] * 4 + ["end"] * 4
    assert (stage.read.most, stage.write.most) == (2, 2)


def test_a_call_waits_for_the_calls_before_it_that_it_conflicts_with():
    stage = Stage()
    stage.write.delay_s = 0.01
    calls = [write("a", "1"), read("a"), write("a/b", "2"), read("."), write("a", "3"), read("a")]
    assert stage.outputs(*calls) == ["1", "1", "2", "nothing", "13", "13"]
    assert stage.write.most == 1


paths = st.sampled_from(["a", "a/b", "b", "b/c", ".", "../x"])
words = st.text(alphabet="xyz", min_size=1, max_size=2)
turns = st.lists(st.one_of(st.builds(read, paths), st.builds(write, paths, words)), max_size=8)


@given(turns, st.integers(0, 1000))
def test_a_turn_has_the_outcome_of_its_calls_one_after_the_other(calls, seed):
    alone = Stage()
    expected = [alone.outputs(call)[0] for call in calls]
    stage = Stage()
    rng = Random(seed)

    async def run(tool, arguments, context):
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        return await Step.run(tool, arguments, context)

    for step in (stage.read, stage.write):
        step.__dict__["run"] = partial(run, step)
    assert stage.outputs(*calls) == expected
    assert stage.world == alone.world


def test_no_more_calls_run_at_once_than_the_limit_says():
    stage = Stage(limits=ToolLimits(parallel_calls=3))
    stage.read.delay_s = 0.001
    stage.outputs(*(read("a") for _ in range(10)))
    assert stage.read.most == 3


def test_finish_waits_for_all_before_it_and_takes_no_time_itself(monkeypatch):
    stage = Stage()
    stage.read.delay_s = 0.02
    clock = SimpleNamespace(perf_counter=lambda: len(stage.log))
    monkeypatch.setattr("etude.agent.execution.time", clock)
    calls = [read("a"), ToolCall("finish")]

    def begun(position, call):
        stage.log.append(("call", call.name))

    results = asyncio.run(execute_calls(calls, stage.context, None, begun))
    assert stage.log == [("call", "read"), ("begin", "a"), ("end", "a"), ("call", "finish")]
    assert results[1].finished and [result.duration_s for result in results] == [2, 0]
    assert Access().conflicts(BARRIER) and BARRIER.conflicts(Access())


def test_a_failing_call_lets_those_that_began_end_and_begins_no_others():
    stage = Stage()
    stage.read.fails.append(SandboxError("gone"))
    stage.write.delay_s = 0.02
    with pytest.raises(SandboxError, match="gone"):
        asyncio.run(stage.play(write("b", "x"), read("a"), write("a", "y"), read("b")))
    assert stage.world == {"b": "x"}
    assert ("begin", "y") not in stage.log and stage.log.count(("begin", "b")) == 0


def test_of_several_failures_the_first_in_call_order_is_raised():
    stage = Stage()
    stage.read.delay_s, stage.write.delay_s = 0.02, 0.0
    stage.read.fails.append(SandboxError("read"))
    stage.write.fails.append(SandboxKilledByAgentError("write"))
    with pytest.raises(SandboxError, match="read") as failure:
        asyncio.run(stage.play(read("a"), write("b", "x")))
    assert "write failed as well: SandboxKilledByAgentError" in failure.value.__notes__[0]


def test_a_failing_provider_is_asked_again_where_that_is_safe():
    stage = Stage()
    stage.read.fails += [InfrastructureError("down"), InfrastructureError("down")]
    assert stage.outputs(read("a")) == ["nothing"]
    stage.read.fails += [InfrastructureError("down")] * 3
    with pytest.raises(InfrastructureError, match="down"):
        stage.outputs(read("a"))
    stage.log.clear()
    stage.write.repeatable = False
    stage.write.fails.append(InfrastructureError("down"))
    with pytest.raises(InfrastructureError):
        stage.outputs(write("a", "x"))
    assert stage.log == [("begin", "x"), ("end", "x")]


def test_a_dead_sandbox_is_not_asked_again():
    stage = Stage()
    stage.read.fails.append(SandboxError("gone"))
    with pytest.raises(SandboxError):
        stage.outputs(read("a"))
    assert len(stage.log) == 2


@pytest.mark.parametrize(
    ("error", "message", "kind"),
    [
        (UserAbortedError("not that"), "not that", ToolErrorClass.USER_ABORTED),
        (TimeoutError(), "read timed out", ToolErrorClass.TIMEOUT),
        (ToolArgumentError("no such word"), "no such word", ToolErrorClass.INVALID_ARGUMENTS),
        (PathMissingError("no such file"), "no such file", ToolErrorClass.UNEXPECTED_ENVIRONMENT),
        (ToolArgumentError("x" * 10_000), "x" * 157 + "...", ToolErrorClass.INVALID_ARGUMENTS),
        (ToolArgumentError("\udcff"), "\ufffd", ToolErrorClass.INVALID_ARGUMENTS),
    ],
)
def test_what_an_agent_can_mend_is_a_short_result_of_its_class(error, message, kind):
    stage = Stage()
    stage.read.fails.append(error)
    (result,) = asyncio.run(stage.play(read("a")))
    assert (result.output, result.error) == (f"error: {message}", kind)


def test_a_timeout_of_a_connection_is_not_the_agents():
    stage = Stage()
    stage.read.fails.append(TimeoutError(110, "connection timed out"))
    with pytest.raises(TimeoutError):
        stage.outputs(read("a"))


def test_a_refused_call_is_a_result_and_the_others_run():
    asked = []

    async def approve(call):
        asked.append(call.arguments["word"])
        await asyncio.sleep(0.01 if call.arguments["word"] == "1" else 0)
        return "not this one" if call.arguments["word"] == "2" else None

    stage = Stage(approve=approve)
    results = asyncio.run(stage.play(write("a", "1"), write("b", "2"), write("c", "3"), read("b")))
    assert asked == ["1", "2", "3"]
    assert [result.output for result in results] == ["1", "error: not this one", "3", "nothing"]
    assert results[1].error == ToolErrorClass.USER_ABORTED
    assert stage.world == {"a": "1", "c": "3"}


def test_only_calls_that_would_run_and_write_are_asked_about():
    async def approve(call):
        raise AssertionError("nothing to ask about")

    stage = Stage(approve=approve)
    stage.write.access = lambda arguments: Access(writes=frozenset({"todo:"}))
    wrong = ToolCall("write", {"path": "a", "words": "x"})
    assert stage.outputs(read("a"), ToolCall("zap"), wrong, write("a", "x"))[3] == "x"


@pytest.mark.parametrize("path", ["a:b.py", "a:/b", "todo:"])
def test_a_path_with_a_colon_is_a_path(path):
    async def approve(call):
        return "not this one"

    stage = Stage(approve=approve)
    assert stage.outputs(write(path, "x")) == ["error: not this one"]
    stage = Stage()
    stage.write.delay_s = 0.01
    assert stage.outputs(write(path, "x"), read("."), write(path, "y"), read(path)) == [
        "x",
        "nothing",
        "xy",
        "xy",
    ]
    assert [what for what, _ in stage.log] == ["begin", "end"] * 4


def test_cancelling_a_turn_ends_its_calls_first():
    stage = Stage()
    stage.read.delay_s = 10.0

    async def cancel():
        task = asyncio.create_task(stage.play(read("a"), read("b"), write("a", "x")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return stage.read.running

    assert asyncio.run(cancel()) == 0
    assert [what for what, _ in stage.log] == ["begin", "begin", "end", "end"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall("zap" * 1000), "unknown tool " + ("zap" * 1000)[:40]),
        (ToolCall("z\udcff"), "unknown tool z\ufffd"),
        (ToolCall("read"), "missing path"),
        (ToolCall("read", {"path": "a", "x" * 99: "y"}), "unknown parameter " + "x" * 40),
        (ToolCall("read", {"path": 7}), "path: expected a string, received an integer"),  # pyright: ignore[reportArgumentType]
        (ToolCall("read", {"path": None}), "path: expected a string, received null"),  # pyright: ignore[reportArgumentType]
        (ToolCall("read", {"path": "a\ud800"}), "path holds characters that are no text"),
        (ToolCall("read", {"path": "a\udcff"}), "path holds characters that are no text"),
        (ToolCall("read", error="e" * 10_000), "e" * 157 + "..."),
    ],
)
def test_a_call_that_cannot_be_run_is_a_short_result(call, message):
    stage = Stage()
    assert stage.outputs(call, read("a")) == [f"error: {message}", "nothing"]


def test_a_hundred_megabytes_of_arguments_are_refused_quickly():
    stage = Stage()
    huge = "x" * (100 << 20)
    start = time.process_time()
    wrong = [
        ToolCall("read", {"path": "a", huge: ""}),
        ToolCall(huge),
        ToolCall("read", {"path": huge, "z": ""}),
    ]
    outputs = stage.outputs(*wrong)
    assert all(output.startswith("error: ") and len(output) < 100 for output in outputs)
    assert stage.read.access({"path": huge}) == reads_path({})
    assert time.process_time() - start < 1.0


def test_directories_stand_for_all_below_and_names_for_themselves():
    def reads(path):
        return Access(reads=frozenset({path}))

    def writes(path):
        return Access(writes=frozenset({path}))

    assert writes("a").conflicts(reads("a/b")) and reads("a").conflicts(writes("a/b"))
    assert not writes("a").conflicts(reads("ab")) and not reads("a").conflicts(reads("a"))
    assert WRITES_ALL.conflicts(reads("x/y")) and writes("x").conflicts(WRITES_ALL)
    assert writes("todo:").conflicts(reads("todo:")) and not writes("todo:").conflicts(WRITES_ALL)
    for nonsense in ("../x", "a\0b", "", "x" * 5000):
        assert reads_path({"path": nonsense}).reads == {"."}


def test_the_overhead_of_a_call_is_small():
    """Not a benchmark: a bound that only a change of the algorithm's order would break."""
    stage = Stage()

    async def time_turns():
        calls = [read(f"p{number}") for number in range(8)]
        start = time.process_time()
        for _ in range(50):
            await execute_calls(calls, stage.context)
        return (time.process_time() - start) / 400

    assert asyncio.run(time_turns()) < 0.005
