import asyncio

import pytest
from file_scenes import FULL, call, contents, new_context, output, replace_files, run

from etude.agent import ToolLimits, execute_calls
from etude.agent.tools.state import is_harness_path
from etude.records import ToolCall, ToolErrorClass

TREE = {
    "a.py": "import b\n",
    "lib/b.py": "x = 1\n",
    "lib/sub/c.txt": "C\n",
    ".hidden/d.py": "x = 1\n",
    ".git/config": "x = 1\n",
    "lib/__pycache__/b.pyc": "x = 1\n",
    ".etude/outputs/1.txt": "x = 1\n",
}


class Changes:
    """`CodeSearch` that notes what it is told."""

    def __init__(self):
        self.paths = []

    def changed(self, path):
        self.paths.append(path)


def test_list_dir_shows_as_many_levels_as_asked_for():
    assert output(call("list_dir"), files=TREE) == ".hidden/d.py\na.py\nlib/b.py\nlib/sub/c.txt"
    assert output(call("list_dir", depth="1"), files=TREE) == ".hidden/\na.py\nlib/"
    assert output(call("list_dir", path="lib", depth="1"), files=TREE) == "lib/b.py\nlib/sub/"
    assert output(call("list_dir", path="lib/", depth="2"), files=TREE) == "lib/b.py\nlib/sub/c.txt"
    assert output(call("list_dir", depth="0"), files=TREE) == "error: depth starts at 1"
    assert output(call("list_dir", depth="x"), files=TREE) == "error: depth is not a number"
    assert output(call("list_dir", path="a.py"), files=TREE) == "error: not a directory"


def test_directories_of_the_harness_show_only_where_their_path_is_given():
    for path in (".git", ".etude", "lib/__pycache__"):
        assert output(call("list_dir", path=path), files=TREE).startswith(path)
        assert output(call("glob", pattern="*", path=path), files=TREE).startswith(path)
        assert output(call("grep", pattern="x", path=path), files=TREE).startswith(path) or "pyc" in path
    shown = output(call("glob", pattern="**"), files=TREE) + output(call("grep", pattern="x ="), files=TREE)
    assert ".git" not in shown and ".etude" not in shown and "pycache" not in shown
    assert output(call("read_file", path=".etude/outputs/1.txt"), files=TREE) == "1\tx = 1"


@pytest.mark.parametrize(
    "path", [".etude", ".etude/outputs/1.txt", "lib/../.etude/new", "/workspace/.etude/x"]
)
def test_no_edit_tool_writes_where_the_harness_keeps_its_files(path):
    calls = [
        call("write_file", path=path, text="y"),
        call("search_replace", path=path, old="x", new="y"),
        call("edit_lines", path=path, start="1", text="y"),
        call("delete_file", path=path, recursive="true"),
    ]
    results, files = run(*calls, files=TREE)
    assert [result.output for result in results] == ["error: .etude is read-only"] * 4
    assert {result.error for result in results} == {ToolErrorClass.INVALID_ARGUMENTS}
    assert files[".etude/outputs/1.txt"] == b"x = 1\n"
    assert not is_harness_path(".etude2/x")


def test_glob_lists_files_by_path():
    assert output(call("glob", pattern="**/*.py"), files=TREE) == ".hidden/d.py\na.py\nlib/b.py"
    assert output(call("glob", pattern="*.{txt,md}"), files=TREE) == "lib/sub/c.txt"
    assert output(call("glob", pattern="sub/*", path="lib"), files=TREE) == "lib/sub/c.txt"
    assert output(call("glob", pattern="*.rs"), files=TREE) == "no match"
    limited = output(call("glob", pattern="**"), files=TREE, limits=ToolLimits(list_entries=2))
    assert limited == ".hidden/d.py\na.py\n... 2 more"
    assert output(call("glob", pattern="*", path="no"), files=TREE) == "error: no such file or directory"
    assert output(call("glob", pattern="{a"), files=TREE) == "error: unclosed {"


def test_read_file_counts_from_the_end_as_well():
    assert output(call("read_file", path="a", offset="-2"), files={"a": "1\n2\n3\n"}) == "2\t2\n3\t3"
    assert (
        output(call("read_file", path="a", offset="-9", limit="1"), files={"a": "1\n2\n"})
        == "1\t1\n... 1 more lines"
    )
    assert output(call("read_file", path="a", offset="-1"), files={"a": ""}) == "empty"
    assert output(call("read_file", path="a", offset="0"), files={"a": "x"}) == "error: offset starts at 1"


def test_write_file_makes_and_replaces_files():
    write = call("write_file", path="new/dir/a.txt", text="one\ntwo\n")
    (result,), files = run(write, files={})
    assert (result.output, files["new/dir/a.txt"]) == ("created", b"one\ntwo\n")
    assert result.facts == {"kind": "edit", "path": "new/dir/a.txt", "line": 1, "changed": True}
    (result,), files = run(write, files={"new/dir/a.txt": "one\n2\n"})
    assert (result.output, result.facts["line"]) == ("ok", 2)
    (result,), files = run(write, files={"new/dir/a.txt": "one\ntwo\n"})
    assert (result.output, result.facts["changed"]) == ("no change", False)
    (result,), files = run(call("write_file", path="a", text=""), files={"a": b"\0\xff"})
    assert (result.output, files["a"]) == ("ok", b"")


def test_write_file_says_what_is_in_the_way():
    assert output(call("write_file", path="lib", text=""), files=TREE) == "error: is a directory"
    assert (
        output(call("write_file", path="a.py/b", text=""), files=TREE)
        == "error: a part of the path is a file"
    )
    assert (
        output(call("write_file", path="../b", text=""), files=TREE) == "error: the path leaves the workspace"
    )
    small = ToolLimits(file_bytes=3)
    assert output(call("write_file", path="b", text="äää"), files={}, limits=small) == "error: file too large"


def test_delete_file_deletes_files_and_empty_directories():
    (result, again), files = run(
        call("delete_file", path="a.py"), call("delete_file", path="a.py"), files=TREE
    )
    assert (result.output, again.output) == ("ok", "error: no such file or directory")
    assert again.error == ToolErrorClass.UNEXPECTED_ENVIRONMENT and "a.py" not in files
    assert result.facts == {"kind": "edit", "path": "a.py", "line": 1, "changed": True}
    steps = [call("delete_file", path="lib/sub/c.txt"), call("delete_file", path="lib/sub")]
    assert [result.output for result in run(*steps, files=TREE)[0]] == ["ok", "ok"]


def test_delete_file_takes_a_whole_directory_only_if_told_to():
    refused = output(call("delete_file", path="lib"), files=TREE)
    assert refused == "error: the directory holds 3 entries: delete it with recursive true"
    (result,), files = run(call("delete_file", path="lib/", recursive="true"), files=TREE)
    assert result.output == "ok, 3 files" and not any(path.startswith("lib") for path in files)
    for path in (".", "/workspace", "lib/.."):
        assert output(call("delete_file", path=path), files=TREE) == "error: the workspace itself stays"


def test_every_edit_is_told_to_the_index():
    async def turn():
        search = Changes()
        context = await new_context(TREE, search=search)
        calls = [
            call("write_file", path="./n.txt", text="x"),
            call("search_replace", path="/workspace/a.py", old="b", new="c"),
            call("edit_lines", path="lib//b.py", start="1", text="y"),
            call("apply_patch", patch="--- /dev/null\n+++ b/p.txt\n@@ -0,0 +1 @@\n+x\n"),
            call("delete_file", path="lib", recursive="true"),
            call("search_replace", path="a.py", old="c", new="c"),
            call("write_file", path="a.py/x", text=""),
        ]
        for one in calls:
            await execute_calls([one], context)
        return search.paths, context.state.changed

    told, noted = asyncio.run(turn())
    assert told == [
        "n.txt",
        "a.py",
        "lib/b.py",
        "p.txt",
        "lib/__pycache__/b.pyc",
        "lib/b.py",
        "lib/sub/c.txt",
    ]
    assert noted == list(dict.fromkeys(told))


WITH_PATH = [
    "list_dir",
    "glob",
    "grep",
    "read_file",
    "edit_lines",
    "search_replace",
    "write_file",
    "delete_file",
]
OTHERS = {"pattern": "x", "start": "1", "text": "x", "old": "x", "new": "y"}


def with_path(name, path):
    accepted = {parameter.name for parameter in FULL[name].schema.parameters if parameter.required}
    return ToolCall(name, {**{key: value for key, value in OTHERS.items() if key in accepted}, "path": path})


@pytest.mark.parametrize("name", WITH_PATH)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\0b", "a path has no NUL characters"),
        ("..", "the path leaves the workspace"),
        ("/etc/passwd", "the path leaves the workspace"),
        ("lib/../../x", "the path leaves the workspace"),
        ("x" * (100 << 20), "path too long"),
        ("a.py/b", "a part of the path is a file"),
    ],
)
def test_impossible_paths_are_short_errors_everywhere(name, path, message):
    (result,), files = run(with_path(name, path), files=TREE)
    assert result.output == f"error: {message}"
    assert result.error in (ToolErrorClass.INVALID_ARGUMENTS, ToolErrorClass.UNEXPECTED_ENVIRONMENT)
    assert files.keys() == TREE.keys()


def test_an_image_may_have_its_workspace_elsewhere():
    async def turn():
        context = await new_context({"a": "x\n"}, workspace="/app")
        inner, _ = await execute_calls([call("read_file", path="/app/a"), call("finish")], context)
        (outer,) = await execute_calls([call("read_file", path="/workspace/a")], context)
        return inner, outer

    inner, outer = asyncio.run(turn())
    assert (inner.output, inner.facts["path"]) == ("1\tx", "a")
    assert outer.output == "error: the path leaves the workspace"


def test_binary_and_large_files_are_neither_shown_nor_edited():
    names = ["read_file", "edit_lines", "search_replace"]
    assert {output(with_path(name, "a"), files={"a": b"x\0"}) for name in names} == {"error: binary file"}
    small = ToolLimits(file_bytes=3)
    assert {output(with_path(name, "a"), files={"a": "xxxx"}, limits=small) for name in names} == {
        "error: file too large"
    }


@pytest.mark.slow
def test_huge_texts_are_refused_before_they_are_copied():
    huge = "x" * (100 << 20)
    calls = [
        call("write_file", path="a", text=huge),
        call("edit_lines", path="a", start="1", text=huge),
        call("search_replace", path="a", old="y", new=huge),
        call("search_replace", path="a", old=huge, new=""),
        call("apply_patch", patch=huge),
        call("grep", pattern=huge),
        call("glob", pattern=huge),
        call("read_file", path="a", offset=huge),
    ]
    results, files = run(*calls, files={"a": "y"})
    assert [result.output[:30] for result in results] == [
        "error: file too large",
        "error: file too large",
        "error: file too large",
        "error: old not found",
        "error: patch too large",
        "error: pattern too long: use a",
        "error: pattern too long",
        "error: offset is not a number",
    ]
    assert files == {"a": b"y"} and all(len(result.output) < 200 for result in results)


def test_a_file_that_changes_while_it_is_read_is_read_at_one_moment():
    async def turn():
        context = await new_context({"a": "one\ntwo\n"})
        files = context.sandbox.files

        class Changing:
            """Every read changes the file behind it."""

            def __getattr__(self, name):
                return getattr(files, name)

            async def read(self, path, limit_bytes=1 << 20):
                data = await files.read(path, limit_bytes)
                await files.write(path, b"changed\n")
                return data

        replace_files(context, Changing())
        edit = call("search_replace", path="a", old="one", new="1")
        (shown,) = await execute_calls([call("read_file", path="a")], context)
        (missed,) = await execute_calls([edit], context)
        replace_files(context, files)
        return shown.output, missed.output, contents(context)["a"]

    assert asyncio.run(turn()) == ("1\tone\n2\ttwo", "error: old not found", b"changed\n")
