"""A watched tree is searched as it is at that moment."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from grep_builders import judged, make_tree

from etude.agent.index.grep import GrepIndex, GrepQuery, Watcher
from etude.agent.index.grep.inotify import Inotify

QUERIES = [GrepQuery("rename_"), GrepQuery("new_name"), GrepQuery("e"), GrepQuery("new_name", path="src")]


def write(path: str, content: bytes = b"new_name = rename_it\n") -> Callable[[Path], None]:
    def edit(tree: Path) -> None:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)

    return edit


def move(old: str, new: str) -> Callable[[Path], None]:
    def edit(tree: Path) -> None:
        (tree / new).parent.mkdir(parents=True, exist_ok=True)
        (tree / old).rename(tree / new)

    return edit


EDITS: dict[str, list[Callable[[Path], object]]] = {
    "a changed file": [write("src/main.py")],
    "a file changed twice": [write("src/main.py", b"first\n"), write("src/main.py")],
    "a new file": [write("src/new.py")],
    "a new directory": [write("fresh/deep/new.py"), write("fresh/deep/more.py")],
    "a removed file": [lambda tree: (tree / "src/main.py").unlink()],
    "a removed directory": [lambda tree: shutil.rmtree(tree / "src")],
    "a moved file": [move("src/main.py", "docs/main.py")],
    "a moved directory, then edited": [move("src", "lib/inner"), write("lib/inner/util/text.py")],
    "a directory moved away and another in its place": [move("src", "old"), write("src/main.py")],
    "an ignored new file": [write("x.log"), write("build/more.py")],
    "an ignored new directory": [write("build/deep/more.py"), write(".cache/x.py")],
    "an edited ignore file": [write(".gitignore", b"src/\n")],
    "a removed ignore file": [lambda tree: (tree / ".gitignore").unlink(), write("build/more.py")],
    "an ignore file that shows a directory, then edits there": [
        write(".gitignore", b""),
        write("build/more/x.py"),
    ],
    "git excludes": [write(".git/info/exclude", b"*.md\n")],
    "git gone": [lambda tree: shutil.rmtree(tree / ".git")],
    "a link in place of a file": [
        lambda tree: (tree / "src/main.py").unlink(),
        lambda tree: (tree / "src/main.py").symlink_to("../setup.py"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("between", [True, False], ids=["searched between", "edits at once"])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_edits_on_disk_are_seen_by_the_next_search(
    tmp_path: Path, edits: list[Callable[[Path], object]], between: bool
) -> None:
    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        (tree / ".git/info").mkdir()
        index = await GrepIndex.build(tree, tmp_path / "index")
        watcher = await Watcher.start(index)
        try:
            for edit in edits:
                edit(tree)
                if between:
                    await watcher.search(GrepQuery("rename_"))
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
            assert watcher.rescans == 0
        finally:
            watcher.close()

    asyncio.run(watched())


def test_edits_before_the_start_are_seen(tmp_path: Path) -> None:
    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        index = await GrepIndex.build(tree, tmp_path / "index")
        write("src/main.py")(tree)
        write("fresh/new.py")(tree)
        write(".ignore", b"docs\n")(tree)
        (tree / "setup.py").unlink()
        watcher = await Watcher.start(index)
        try:
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
        finally:
            watcher.close()

    asyncio.run(watched())


def test_lost_events_cost_a_comparison_and_no_matches(tmp_path: Path) -> None:
    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        watcher = await Watcher.start(await GrepIndex.build(tree, tmp_path / "index"))
        try:
            write("src/main.py")(tree)
            watcher._inotify.drain()  # as the kernel does when its queue is full
            watcher._inotify.overflowed = True
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
            assert watcher.rescans == 1
        finally:
            watcher.close()

    asyncio.run(watched())


def test_a_directory_that_is_watched_under_its_new_name_first_stays_watched(tmp_path: Path) -> None:
    """A comparison of the tree may find it there before the event of its move is read."""
    inotify = Inotify(bytes(make_tree(tmp_path)))
    try:
        assert inotify.watch(b"") and inotify.watch(b"src") and inotify.watch(b"src/util")
        move("src", "lib")(tmp_path)
        assert inotify.watch(b"lib") and inotify.watch(b"lib/util")
        assert {event.path for event in inotify.drain()} == {b"src", b"lib"}
        for path in ("lib/a.py", "lib/util/b.py"):
            write(path)(tmp_path)
        assert {event.path for event in inotify.drain()} == {b"lib/a.py", b"lib/util/b.py"}
    finally:
        inotify.close()


@pytest.mark.parametrize("read", [[2], [2, 0]], ids=["once", "twice at once"])
def test_folding_takes_changes_into_the_index_and_goes_on_watching(tmp_path: Path, read: list[int]) -> None:
    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        watcher = await Watcher.start(await GrepIndex.build(tree, tmp_path / "index"))
        try:
            write("src/main.py")(tree)
            write("fresh/new.py")(tree)
            assert await asyncio.gather(*(watcher.fold() for _ in read)) == read
            write("fresh/newer.py")(tree)
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
        finally:
            watcher.close()

    asyncio.run(watched())
