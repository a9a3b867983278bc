import asyncio
from functools import partial

import file_scenes
import pytest
from file_scenes import CORE, FILES, call
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent import ToolContext, ToolLimits, execute_calls
from etude.agent.tools.edit_lines import replace_lines
from etude.errors import SandboxError, ToolArgumentError
from etude.records import ToolCall, ToolErrorClass
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.types import CommandResult

run = partial(file_scenes.run, tools=CORE)
output = partial(file_scenes.output, tools=CORE)


def test_list_dir_lists_all_files_sorted():
    assert output(call("list_dir")) == "lib/tags.py\nlib/tally.py\ntests/test_all.py"
    assert output(call("list_dir", path="lib")) == "lib/tags.py\nlib/tally.py"
    assert output(call("list_dir"), files={"__pycache__/a.pyc": "x"}) == "no files"
    assert output(call("list_dir"), limits=ToolLimits(list_entries=1)) == "lib/tags.py\n... 2 more"


def test_grep_shows_path_line_and_text():
    assert output(call("grep", pattern="total =")) == "lib/tally.py:2: total = 1"
    assert output(call("grep", pattern="def test", path="lib")) == "no match"
    cut = output(call("grep", pattern="def"), limits=ToolLimits(grep_matches=1))
    assert cut == "lib/tally.py:1: def tally(xs, a):\n... more"


def test_read_file_numbers_its_lines():
    text = output(call("read_file", path="lib/tally.py"))
    assert text.split("\n")[:2] == ["1\tdef tally(xs, a):", "2\t    total = 1"]
    part = output(call("read_file", path="lib/tally.py", offset="2", limit="1"))
    assert part == "2\t    total = 1\n... 3 more lines"
    assert output(call("read_file", path="a"), files={"a": ""}) == "empty"
    assert output(call("read_file", path="a"), files={"a": "x\n\n"}) == "1\tx\n2\t"


def test_edit_lines_replaces_the_named_lines():
    edit = call("edit_lines", path="lib/tally.py", start="2", text="    total = 0")
    (result,), files = run(edit)
    assert result.output == "ok"
    assert result.facts == {"kind": "edit", "path": "lib/tally.py", "line": 2, "changed": True}
    assert files["lib/tally.py"].decode() == FILES["lib/tally.py"].replace("= 1", "= 0")


def test_search_replace_wants_exactly_one_match():
    replaced = call("search_replace", path="a", old="y", new="z")
    (result,), files = run(replaced, files={"a": "x\ny\n"})
    assert (result.output, files["a"], result.facts["line"]) == ("ok", b"x\nz\n", 2)
    assert output(replaced, files={"a": "x"}) == "error: old not found"
    assert output(replaced, files={"a": "yy"}) == "error: old found more than once"
    overlapping = call("search_replace", path="a", old="aa", new="b")
    assert output(overlapping, files={"a": "aaa"}) == "error: old found more than once"


def test_an_edit_that_changes_nothing_says_so():
    assert output(call("search_replace", path="a", old="y", new="y"), files={"a": "y"}) == "no change"
    assert output(call("edit_lines", path="a", start="1", text="y"), files={"a": "y"}) == "no change"


def test_bytes_that_are_not_text_survive_an_edit():
    edit = call("search_replace", path="a", old="x", new="y")
    (result, shown), files = run(edit, call("read_file", path="a"), files={"a": b"x \xff\n"})
    assert result.output == "ok" and files["a"] == b"y \xff\n"
    assert shown.output == "1\ty \ufffd"


def test_run_tests_reports_failures_in_a_line_each():
    failing = output(call("run_tests"))
    assert failing == "FAIL test_tally: 4 != 3\nFAIL test_empty: 1 != 0\n2 failed, 0 passed"
    (_, result), _ = run(
        call("edit_lines", path="lib/tally.py", start="2", text="    total = 0"), call("run_tests")
    )
    assert result.output == "2 passed"
    assert result.facts == {"kind": "test", "num_passed": 2, "num_failed": 0, "green": True}


def test_run_tests_shows_at_most_three_failures():
    tests = "".join(f"def test_{n}():\n    assert {n} == 9\n" for n in range(5))
    lines = output(call("run_tests"), files={"tests/test_all.py": tests}).split("\n")
    assert len(lines) == 4 and lines[-1] == "5 failed, 0 passed"


def test_tests_that_do_not_import_are_an_outcome():
    (result,), _ = run(call("run_tests"), files={"tests/test_all.py": "def broken(:\n"})
    assert result.output.startswith("error: ") and result.error is None
    assert result.facts["green"] is False


def test_tests_that_hang_are_the_agents_timeout():
    files = {"tests/test_all.py": "def test_x():\n    while True:\n        pass\n"}
    (result,), _ = run(call("run_tests"), files=files, limits=ToolLimits(test_timeout_s=0.05))
    assert (result.output, result.error) == ("error: tests timed out", ToolErrorClass.TIMEOUT)


@pytest.mark.parametrize(
    ("wrong", "message", "error"),
    [
        (call("read_file", path="no.py"), "no such file or directory", "unexpected_environment"),
        (call("read_file", path="lib"), "is a directory", "unexpected_environment"),
        (call("read_file", path="../x"), "the path leaves the workspace", "invalid_arguments"),
        (call("read_file", path=" "), "path is empty", "invalid_arguments"),
        (call("read_file", path="lib/tally.py", offset="x"), "offset is not a number", "invalid_arguments"),
        (call("read_file", path="lib/tally.py", offset="9"), "only 5 lines", "invalid_arguments"),
        (call("read_file", path="lib/tally.py", limit="0"), "limit starts at 1", "invalid_arguments"),
        (call("edit_lines", path="lib/tally.py", start="9", text=""), "start must be 1 to 6", None),
        (call("edit_lines", path="lib/tally.py", start="3", end="2", text=""), "end must be 3 to 5", None),
        (call("edit_lines", path="lib/tally.py", start="2"), "missing text", "invalid_arguments"),
        (call("grep", pattern=""), "pattern is empty", "invalid_arguments"),
        (call("list_dir", foo="x"), "unknown parameter foo", "invalid_arguments"),
        (call("search_replace", path="lib/tally.py", old="", new=""), "old is empty", None),
        (call("zap"), "unknown tool zap", "invalid_arguments"),
        (ToolCall("grep", {}, "unclosed grep"), "unclosed grep", "malformed"),
    ],
)
def test_what_the_agent_did_wrong_is_a_short_result(wrong, message, error):
    (result,), files = run(wrong)
    assert result.output == f"error: {message}"
    assert result.error == (error or "invalid_arguments")
    assert files["lib/tally.py"].decode() == FILES["lib/tally.py"]


def test_large_and_binary_files_are_left_alone():
    assert output(call("read_file", path="a"), files={"a": b"\0"}) == "error: binary file"
    small = ToolLimits(file_bytes=4)
    assert output(call("read_file", path="a"), files={"a": "12345"}, limits=small) == "error: file too large"
    grown = call("edit_lines", path="a", start="1", text="12345")
    assert output(grown, files={"a": "1"}, limits=small) == "error: file too large"


lines = st.lists(st.text(alphabet="ab ", max_size=3), min_size=1, max_size=6)


@given(lines, lines, st.data())
@settings(deadline=None)
def test_replacing_lines_agrees_with_list_slices(before, new, data):
    start = data.draw(st.integers(1, len(before)))
    end = data.draw(st.integers(start, len(before)))
    content = "".join(line + "\n" for line in before)
    expected = [*before[: start - 1], *new, *before[end:]]
    if "\n".join(new):
        assert replace_lines(content, start, end, "\n".join(new)) == "".join(x + "\n" for x in expected)
    deleted = [*before[: start - 1], *before[end:]]
    assert replace_lines(content, start, end, "") == "".join(x + "\n" for x in deleted)


def test_line_ends_stay_as_the_file_has_them():
    assert replace_lines("a\r\nb\r\n", 1, 1, "c\nd") == "c\r\nd\r\nb\r\n"
    assert replace_lines("a\r\nb", 2, 2, "c") == "a\r\nc"
    assert replace_lines("a\r\nb", 3, 3, "c") == "a\r\nb\r\nc\r\n"
    assert replace_lines("a\nb", 2, 2, "c") == "a\nc"
    assert replace_lines("a", 2, 2, "b") == "a\nb\n"
    assert replace_lines("", 1, 1, "b") == "b\n"
    with pytest.raises(ToolArgumentError):
        replace_lines("", 0, 0, "b")


class CommandSandbox:
    """A sandbox whose commands answer as told: the in-memory one runs none."""

    def __init__(self, answer):
        self.answer = answer
        self.commands = self

    async def run(self, cmd, timeout_s=30.0, env=None, cwd=None, limit_bytes=1 << 16):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run_command(answer):
    context = ToolContext(CommandSandbox(answer), CORE)  # pyright: ignore[reportArgumentType]
    return asyncio.run(execute_calls([call("run_command", command="make")], context))[0]


def test_run_command_shows_output_and_exit_code():
    assert run_command(CommandResult(0, "", "", False, 0.1, False)).output == "ok"
    failed = run_command(CommandResult(2, "out\n", "err\n", False, 0.1, False))
    assert (failed.output, failed.error) == ("out\nerr\nexit 2", None)
    late = run_command(CommandResult(-9, "part", "", True, 30.0, True))
    assert (late.output, late.error) == ("part\n... cut\nerror: command timed out", ToolErrorClass.TIMEOUT)


def test_failing_infrastructure_is_never_a_result():
    with pytest.raises(SandboxError):
        run_command(SandboxError("gone"))
    with pytest.raises(SandboxKilledByAgentError):
        run_command(SandboxKilledByAgentError("the first process was killed"))
