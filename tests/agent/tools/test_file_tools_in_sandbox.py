"""File tools on a real file system: links, special files, depth, and commands running concurrently."""

import asyncio
import re

import pytest
from tool_scenes import in_local

from etude.agent import execute_calls
from etude.agent.tools import full_registry
from etude.records import ToolCall

TOOLS = list(full_registry().values())


def test_links_are_deleted_themselves_and_lead_nowhere_outside():
    async def scenario(call, context):
        await call(
            "run_command", command="mkdir d; echo x > d/f; ln -s d link; ln -s /etc out; ln -s gone dangling"
        )
        deleted = [await call("delete_file", path=path) for path in ("link", "dangling", "d")]
        others = [
            await call("read_file", path="out/passwd"),
            await call("write_file", path="out/new", text="x"),
            await call("grep", pattern="root", path="out"),
            await call("list_dir", path="out"),
            await call("read_file", path="/proc/self/mem"),
        ]
        left = await call("run_command", command="ls; cat d/f")
        return [result.output for result in deleted], {result.output for result in others}, left.output

    deleted, others, left = in_local(TOOLS, scenario)
    assert deleted == ["ok", "ok", "error: the directory holds 1 entries: delete it with recursive true"]
    assert others == {"error: the path leaves the workspace"}
    assert left == "d\nout\nx"


def test_special_files_are_errors_and_nobody_waits_for_them():
    async def scenario(call, context):
        await call("run_command", command="mkfifo pipe; mkdir deep; printf 'a\\0b' > binary")
        return [
            (await call(name, path=path, **more)).output
            for name, path, more in (
                ("read_file", "pipe", {}),
                ("write_file", "pipe", {"text": "x"}),
                ("grep", "pipe", {"pattern": "x"}),
                ("read_file", "deep", {}),
                ("read_file", "binary", {}),
                ("read_file", "x" * 300, {}),
            )
        ]

    shown = in_local(TOOLS, scenario)
    assert shown[:2] == ["error: not a regular file"] * 2 and shown[2].startswith("error: ")
    assert shown[3:5] == ["error: is a directory", "error: binary file"] and shown[5].startswith("error: ")


def test_an_edit_works_on_what_a_command_left():
    async def scenario(call, context):
        await call("read_file", path="a.py")
        await call("run_command", command="printf 'x = 2\\r\\ny = 3\\r\\n' > a.py")
        edited = await call("search_replace", path="a.py", old="x = 2\ny", new="x = 4\nz")
        patch = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n x = 4\n-z = 3\n+z = 5\n"
        patched = await call("apply_patch", patch=patch)
        return edited.output, patched.output, await context.sandbox.files.read("a.py")

    expected = ("ok", "ok", b"x = 4\r\nz = 5\r\n")
    assert in_local(TOOLS, scenario, {"a.py": "x = 1\n"}) == expected


def test_a_turn_of_many_reads_and_edits_is_right_in_a_real_sandbox():
    async def scenario(call, context):
        calls = []
        for number in range(12):
            path = f"f{number}.txt"
            calls += [
                ToolCall("read_file", {"path": path}),
                ToolCall("search_replace", {"path": path, "old": "old", "new": f"new {number}"}),
                ToolCall("read_file", {"path": path}),
            ]
        return [result.output for result in await execute_calls(calls, context)]

    shown = in_local(TOOLS, scenario, {f"f{number}.txt": "old\n" for number in range(12)})
    assert shown == [line for number in range(12) for line in ("1\told", "ok", f"1\tnew {number}")]


@pytest.mark.slow
def test_a_file_that_is_rewritten_all_the_time_is_read_and_searched_without_harm():
    async def scenario(call, context):
        command = "while :; do echo aaaa > a; echo bbbbbbbb > a; rm a; done"
        busy = asyncio.create_task(call("run_command", command=f"timeout 1 sh -c '{command}'"))
        seen = set()
        while not busy.done():
            for name, more in (("read_file", {"path": "a"}), ("grep", {"pattern": "a+|b+"})):
                seen.add((await call(name, **more)).output)
        await busy
        return seen

    seen = in_local(TOOLS, scenario, {"a": "aaaa\n"})
    # A read may fall between two writes: then what was there first is followed by the rest of what came next.
    line = r"(1\t|a:1: )(a{4}|b+)(\n(2\t|a:2: )b+)?"
    known = re.compile(rf"empty|no match|error: no such file or directory|{line}")
    assert all(known.fullmatch(output) for output in seen) and len(seen) > 1
