import asyncio
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from file_scenes import call, new_context, output, run

from etude.agent import ToolLimits, execute_calls
from etude.agent.tools.grep import find
from etude.agent.tools.ports import GrepRequest
from etude.errors import InfrastructureError, ToolArgumentError
from etude.records import ToolErrorClass
from etude.sandbox.types import GrepMatch

RIPGREP = shutil.which("rg", path=f"{Path(sys.executable).parent}") or shutil.which("rg")
TREE = {
    "a.py": "import b\n\ndef Foo(x):\n    return x{1}\n",
    "lib/b.py": "foo = {\n    'a': 1,\n}\n",
    "lib/b.txt": "foo\r\nbar  \n",
    "lib/sub/é.md": "# Foo — foo\n",
    ".hidden/c.py": "foo = 1\n",
    "lib/.d.py": "foo = 1\n",
    "data.bin": b"foo\0\n",
    "bad.txt": b"foo \xff\n",
}


class Ripgrep:
    """`CodeSearch` by ripgrep itself over a copy of the files."""

    def __init__(self, root, files):
        self.root = root
        for path, content in files.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())

    async def grep(self, request):
        command = [
            RIPGREP,
            "--no-config",
            "--line-number",
            "--with-filename",
            "--null",
            "--sort=path",
            "--no-heading",
        ]
        command += [f"--glob={glob}" for glob in request.globs] + ["--ignore-case"] * request.ignore_case
        command += ["--regexp", request.pattern, "--", request.path]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, cwd=self.root)
        assert done.returncode < 2, done.stderr
        matches = []
        for line in done.stdout.decode(errors="replace").split("\n")[:-1]:
            path, _, rest = line.partition("\0")
            number, _, text = rest.partition(":")
            matches.append(GrepMatch(path.removeprefix("./"), int(number), text.rstrip("\r")))
        return matches[: request.limit]

    def changed(self, path): ...

    def changed_somewhere(self): ...


@pytest.mark.parametrize(
    "arguments",
    [
        {"pattern": "foo"},
        {"pattern": "foo", "ignore_case": "true"},
        {"pattern": "foo = {"},
        {"pattern": "x{1}"},
        {"pattern": r"\bfoo\b", "include": "*.py"},
        {"pattern": "foo", "include": "lib/**/*.{md,txt}"},
        {"pattern": "foo", "include": "!*.txt"},
        {"pattern": "foo", "path": "lib"},
        {"pattern": "foo", "path": "lib/b.txt"},
        {"pattern": "foo", "path": ".hidden"},
        {"pattern": "foo", "path": "lib/.d.py"},
        {"pattern": "[[:upper:]]oo", "path": "."},
        {"pattern": "^(def|import)", "context": "1"},
        {"pattern": "nothing at all"},
    ],
)
def test_the_index_and_the_sandbox_show_the_same(tmp_path, arguments):
    if RIPGREP is None:
        pytest.skip("ripgrep is not installed")
    alone = output(call("grep", **arguments), files=TREE)
    assert output(call("grep", **arguments), files=TREE, search=Ripgrep(tmp_path, TREE)) == alone
    assert (alone == "no match") == (arguments["pattern"] == "nothing at all")


def test_case_and_files_can_be_chosen():
    assert output(call("grep", pattern="foo", include="*.py"), files=TREE) == "lib/b.py:1: foo = {"
    both = output(call("grep", pattern="foo", ignore_case="true", include="*.py"), files=TREE)
    assert both == "a.py:3: def Foo(x):\nlib/b.py:1: foo = {"
    assert output(call("grep", pattern="foo", ignore_case="perhaps"), files=TREE).startswith(
        "error: ignore_case"
    )
    assert output(call("grep", pattern="foo", include="{"), files=TREE) == "error: unclosed {"


def test_a_refused_pattern_is_quoted_as_the_agent_wrote_it():
    class Refusing:
        """An index whose ripgrep quotes the pattern in its own frame."""

        async def grep(self, request):
            words = f"regex parse error:\n    (?:{request.pattern})\n       ^^\nerror: too much of it"
            raise ToolArgumentError(words, field="pattern", received=request.pattern)

        def changed(self, path): ...

        def changed_somewhere(self): ...

    shown = output(call("grep", pattern="a{b"), files=TREE, search=Refusing())
    assert shown == "error: bad regular expression: too much of it"
    assert output(call("grep", pattern="(a"), files=TREE).endswith("missing ), unterminated subpattern")
    assert (
        output(call("grep", pattern="[z--]"), files=TREE)
        == "error: bad regular expression: bad character range"
    )
    assert output(call("grep", pattern="[z-a]"), files=TREE).endswith("bad character range z-a")


def test_the_error_itself_holds_the_agents_pattern():
    from etude.agent.tools.grep import Grep

    class Slow:
        async def grep(self, pattern, path, limit):
            raise ToolArgumentError("the search took too long", field="pattern", received=pattern)

    class Sandbox:
        files = Slow()

    async def go():
        context = await new_context(TREE)
        context = dataclasses.replace(context, sandbox=Sandbox())
        await Grep().run({"pattern": "a{b", "ignore_case": "true"}, context)

    with pytest.raises(ToolArgumentError) as caught:
        asyncio.run(go())
    assert caught.value.received == "a{b"


def test_lines_around_a_match_are_shown_on_demand():
    text = "".join(f"{n}\n" for n in "abcdefghij")
    shown = output(call("grep", pattern="[cdi]", context="1"), files={"x": text, "y": "c\n"})
    assert shown.split("\n") == [
        "x-2- b", "x:3: c", "x:4: d", "x-5- e", "--", "x-8- h", "x:9: i", "x-10- j", "--", "y:1: c", "y-2- "
    ]  # fmt: skip
    assert output(call("grep", pattern="c", context="9"), files={"x": text}) == "error: context is 0 to 5"


def test_matches_that_do_not_count_are_replaced_by_others():
    files = {f".cache/{n:03}": "foo\n" for n in range(300)} | {"z": "foo\n", "zz": "foo\n"}
    assert output(call("grep", pattern="foo"), files=files) == "z:1: foo\nzz:1: foo"
    cut = output(call("grep", pattern="foo"), files=files, limits=ToolLimits(grep_matches=1))
    assert cut == "z:1: foo\n... more"


def test_the_harness_own_files_are_searched_in_the_sandbox():
    class Dead:
        async def grep(self, request):
            raise InfrastructureError("not to be asked")

    files = {".etude/history/1.txt": "foo\n"}
    shown = output(call("grep", pattern="foo", path=".etude"), files=files, search=Dead())
    assert shown == ".etude/history/1.txt:1: foo"
    with pytest.raises(InfrastructureError):
        output(
            call("grep", pattern="foo"), files=files, search=Dead(), limits=ToolLimits(provider_attempts=1)
        )


def test_wrong_patterns_are_refused_whoever_would_search():
    for pattern in ("a(?=b)", "(", r"\Aa", "a" * 2000):
        (result,), _ = run(call("grep", pattern=pattern), files=TREE)
        assert result.error == ToolErrorClass.INVALID_ARGUMENTS and result.output.startswith("error: ")


def test_a_file_that_is_gone_shows_its_matches_alone():
    async def turn():
        context = await new_context({"x": "a\nb\nc\n"})
        matches = await find(GrepRequest("b", limit=5), context)

        class Stale(Ripgrep):
            def __init__(self): ...

            async def grep(self, request):
                return [*matches, GrepMatch("gone", 7, "b")]

        stale = await new_context({"x": "a\n"}, search=Stale())
        (result,) = await execute_calls([call("grep", pattern="b", context="1")], stale)
        return result.output

    assert asyncio.run(turn()) == "x-1- a\nx:2: b\n--\ngone:7: b"
