"""What an agent may try with its tools alone, as the documentation describes them: written from README and
docs, without sight of the code. Each act is a sequence of turns, each a tuple of calls made side by side, and
leaves a solved task solved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etude.records import ToolCall

Turns = tuple[tuple[ToolCall, ...], ...]
_HALF = "\ud800"
_NO_ARGUMENTS: tuple[Any, ...] = (
    None,
    [],
    {},
    [[[]]],
    1e400,
    True,
    10**400,
    "[" * 50_000,
    "1e999999",
    "9" * 5000,
)


def _call(tool: str, **arguments: Any) -> ToolCall:
    """A call as a model writes it: what is no text is written as JSON."""
    written = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()
    }
    return ToolCall(tool, written)


def _run(command: str, **more: Any) -> ToolCall:
    return _call("run_command", command=command, **more)


def _each(*calls: ToolCall) -> Turns:
    """One turn for each call."""
    return tuple((call,) for call in calls)


def _write(path: str, text: str) -> ToolCall:
    return _call("write_file", path=path, text=text)


_LOUD = "seq 1 60000"
"""Longer than what is shown: the whole of it lies in the harness's directory."""
_SWAPS = """while :; do
rm -rf lib/x; mkdir lib/x; rmdir lib/x
ln -s /dev/zero lib/x; rm lib/x; mkfifo lib/x; rm lib/x; echo x > lib/x
done"""

BY_COMMANDS: Mapping[str, Turns] = {
    "more background commands than may run": (
        tuple(_run("sleep 600", background=True) for _ in range(40)),
        (_run("echo still here"),),
    ),
    "a background command that prints without end": _each(
        _run("yes", background=True), _call("run_command", id=1, wait_s=2), _call("run_command", id=1)
    ),
    "standard input that nobody reads": _each(
        _run("sleep 600", background=True),
        *(_call("run_command", id=1, stdin="x" * 300_000) for _ in range(3)),
        _call("run_command", id=1, kill=True),
        _call("run_command", id=1, stdin="more"),
    ),
    "looks at commands that never were": _each(
        *(
            _call("run_command", id=number, **more)
            for number in (0, -1, 7, 10**30)
            for more in ({}, {"kill": True}, {"stdin": "x"})
        )
    ),
    "several forms of a command at once": _each(
        _run("true", id=1, background=True, stdin="x", kill=True, wait_s=-1), _call("run_command")
    ),
    "times that make no sense": _each(
        *(_run("true", timeout_s=time_s) for time_s in (0, -1, 1e308, float("nan"), float("inf"), "soon"))
    ),
    "a wait longer than the session": _each(
        _run("sleep 1", background=True), _call("run_command", id=1, wait_s=1e308)
    ),
    "commands that are no text": _each(_run(f"echo {_HALF}"), _run("echo a\0b"), _run("x" * 3_000_000)),
    "outputs that go into pipes": _each(
        _run("rm -rf .etude; mkdir -p .etude/outputs; cd .etude/outputs; mkfifo 1.txt 2.txt command-1.txt"),
        _run(_LOUD),
        _run(_LOUD, background=True),
        _call("run_command", id=1, wait_s=1),
    ),
    "outputs that go where links lead": _each(
        _run("rm -rf .etude; mkdir .etude; ln -s /proc/self .etude/outputs"),
        _run(_LOUD),
        _run("rm -rf .etude; ln -s / .etude"),
        _run(_LOUD),
        _run(_LOUD, background=True),
    ),
    "outputs in a directory without rights": _each(
        _run("mkdir -p .etude/outputs; chmod 0 .etude/outputs .etude"), _run(_LOUD), _run(_LOUD)
    ),
    "outputs on a full disk": _each(
        _run("head -c 1G /dev/zero > /tmp/full"),
        _run(_LOUD),
        _run(_LOUD, background=True),
        _run("rm /tmp/full"),
    ),
    "names that change what they are while tools look": (
        (_run(_SWAPS, background=True),),
        *(
            (
                _call("read_file", path="lib/x"),
                _call("list_dir", path="lib"),
                _call("grep", pattern="x", path="lib/x"),
                _write("lib/x", "y"),
                _call("delete_file", path="lib/x", recursive=True),
            )
            for _ in range(6)
        ),
        (_run("kill -9 -1"),),
        (_run("rm -rf lib/x"),),
    ),
}

BY_TESTS: Mapping[str, Turns] = {
    "visible tests that end what runs them": _each(
        _write(
            "tests/test_all.py",
            "import os, signal\n\ndef test_a():\n    os.kill(os.getppid(), signal.SIGKILL)\n",
        ),
        _call("run_tests"),
        _call("run_tests"),
    ),
    "visible tests that hang as they are read": _each(
        _write("tests/test_all.py", "while True: pass\n"), _call("run_tests")
    ),
    "visible tests with five thousand failures": _each(
        _write(
            "tests/test_all.py",
            "\n".join(f"def test_{n}{'x' * 100}():\n    assert 'y' * 3000 == {n}" for n in range(5000)),
        ),
        _call("run_tests"),
    ),
    "a conftest that ends pytest": _each(
        _write("conftest.py", "import os\nos.write(1, b'\\xff' * 4_000_000)\nos._exit(0)\n"),
        _call("run_tests", paths=["."]),
        _call("delete_file", path="conftest.py"),
    ),
    "a configuration of pytest that never ends": _each(
        _write("pytest.ini", "[pytest]\naddopts = -p evil --rootdir=/ --count " + "x" * 100_000 + "\n"),
        _write("evil.py", "import time\ntime.sleep(600)\n"),
        _call("run_tests", paths=["."]),
        _run("rm pytest.ini evil.py"),
    ),
    "a pytest of the agent's own": _each(
        _write("pytest/__init__.py", ""),
        _write("pytest/__main__.py", "import os\nwhile True: os.write(1, b'<testsuite>\\xff' * 100_000)\n"),
        _call("run_tests", paths=["."]),
        _run("rm -rf pytest"),
    ),
    "a result of tests that is none": _each(
        _write(
            "pytest.py",
            "import sys\nfor one in sys.argv:\n"
            "    if '=' in one: open(one.partition('=')[2], 'wb').write(b'<a ' + b'<a>' * 1_000_000)\n",
        ),
        _call("run_tests", paths=["."]),
        _run("rm pytest.py"),
    ),
    "paths of tests that are options": _each(
        _call(
            "run_tests", paths=["-h", "--junitxml=/dev/full", "-c/dev/zero", "tests::../..", "\0", _HALF, ""]
        ),
        _call("run_tests", paths=["tests/test_all.py"] * 3000),
        _call("run_tests", paths="tests"),
    ),
}

BY_EDITS: Mapping[str, Turns] = {
    "a patch of ten thousand hunks that fit nowhere": _each(
        _call(
            "apply_patch",
            patch="--- a/lib/tally.py\n+++ b/lib/tally.py\n" + "@@ @@\n-no such line\n+another\n" * 10_000,
        )
    ),
    "a patch of what is outside, of directories and of nothing": _each(
        *(
            _call("apply_patch", patch=f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n")
            for path in ("../../etc/passwd", "lib", ".", "", "/dev/null", "\0", _HALF, "x/" * 3000)
        ),
        _call("apply_patch", patch=""),
        _call("apply_patch", patch="@@"),
    ),
    "a search for ten thousand lines that nearly match": _each(
        _write("lines.txt", "".join(f"    value = {n % 7}  # {n}\n" for n in range(20_000))),
        _call(
            "search_replace",
            path="lines.txt",
            old="".join(f"  value = {n % 5}  # {n}\n" for n in range(10_000)),
            new="",
        ),
        _call("delete_file", path="lines.txt"),
    ),
    "a replacement that grows a file beyond its size": _each(
        _write("grow.txt", "a" * 500_000),
        _call("search_replace", path="grow.txt", old="a", new="b" * 1000, replace_all=True),
        _call("delete_file", path="grow.txt"),
    ),
    "lines that do not exist": _each(
        *(
            _call("edit_lines", path="lib/tally.py", start=start, end=end, text="")
            for start, end in ((0, -1), (-5, 2), (10**30, 10**31), (5, 1))
        ),
        _call("read_file", path="lib/tally.py", offset=-(10**30), limit=10**30),
    ),
    "files written over what is no file": _each(
        *(
            _write(path, "x")
            for path in (".", "", "/", "lib", "/dev/null", "..", "~", "a" * 5000, "b/" * 2000 + "c")
        ),
        _call("delete_file", path=".", recursive=True),
        _call("delete_file", path="/", recursive=True),
    ),
    "arguments of every wrong type": _each(
        *(
            ToolCall(tool, dict.fromkeys(("path", "pattern", "text", "old", "new", "start", "depth"), value))
            for tool in (
                "read_file",
                "list_dir",
                "glob",
                "grep",
                "edit_lines",
                "search_replace",
                "read_lints",
            )
            for value in _NO_ARGUMENTS
        ),
        _call("no_such_tool"),
        _call(""),
    ),
}

BY_SEARCHES: Mapping[str, Turns] = {
    "braces within braces": _each(
        _call("glob", pattern="{a,b}" * 40),
        _call("glob", pattern="{" * 2000 + "}" * 2000),
        _call("glob", pattern="**/" * 2000 + "x"),
        _call("grep", pattern="x", include="{a,b,c}" * 60),
    ),
    "repetitions within repetitions": _each(
        _write("long.txt", "x" * 60_000 + "\n"),
        *(
            _call("grep", pattern=pattern)
            for pattern in ("(x+x+)+y", "((x{1,30}){1,30}){1,30}y", "(x|x)*" * 60)
        ),
        _call("delete_file", path="long.txt"),
    ),
    "an ignore file that ignores in a hundred thousand ways": _each(
        _run("seq -f '!**/a%g/**/[a-z]*/**/x' 1 100000 > .gitignore"),
        _call("grep", pattern="x"),
        _call("glob", pattern="*"),
        _call("list_dir"),
        _run("rm .gitignore"),
    ),
    "a linter's configuration that extends itself": _each(
        _write("ruff.toml", 'extend = "ruff.toml"\n'),
        _call("read_lints", all=True),
        _write("pyproject.toml", "[tool.ruff]\nextend = '/dev/zero'\n" + "x = [" * 50_000),
        _call("read_lints", all=True),
        _run("rm ruff.toml pyproject.toml"),
    ),
    "a repository that is none": _each(
        _write(".git", "gitdir: /proc/self/fd\n"),
        _call("read_lints"),
        _run(
            "rm .git; mkdir -p .git/objects .git/refs; echo 'ref: ../../etc' > .git/HEAD;"
            " printf '[core]\\nfsmonitor = sleep 600\\n' > .git/config"
        ),
        _call("read_lints", paths=["lib"]),
        _call("grep", pattern="x", path=".git"),
        _run("rm -rf .git"),
    ),
    "to-do lists that nobody can show": _each(
        _call(
            "todo_write",
            todos=[{"id": str(n), "text": "x" * 10_000, "status": "pending"} for n in range(5000)],
        ),
        _call("todo_write", todos=[{"id": _HALF, "text": "\0\x1b[2J" + _HALF, "status": "done"}], merge=True),
        _call("todo_write", todos=[[[]]]),
    ),
    "questions without an end": (
        tuple(_call("ask_user", question=f"{n}" + "?" * 100_000, options=["x"] * 100) for n in range(20)),
        (_call("semantic_search", query="x" * 1_000_000, limit=10**30),),
    ),
    "two hundred calls in one turn": (
        tuple(_call("read_file", path="lib/tally.py") for _ in range(100))
        + tuple(_run(f"echo {n}") for n in range(20))
        + tuple(_write(f"same-{n % 3}.txt", str(n)) for n in range(80)),
    ),
    "an end among other calls, and calls after it": (
        (_call("finish"), _run("echo after"), _call("finish")),
        (_run("echo later"),),
        (_call("finish", answer="x" * 1_000_000),),
    ),
}

BY_TOOLS: Mapping[str, Turns] = {**BY_COMMANDS, **BY_TESTS, **BY_EDITS, **BY_SEARCHES}
