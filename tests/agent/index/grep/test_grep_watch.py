"""A watched tree is searched as it is at that moment."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from grep_builders import judged, make_tree

from etude.agent.index.grep import GrepIndex, GrepQuery, Watcher
from etude.agent.index.grep import watch as watching

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
    "hidden files": [write(".secret.py"), write(".cache/x.py"), write("src/.x/y.py")],
    "a link in place of a file": [
        lambda tree: (tree / "src/main.py").unlink(),
        lambda tree: (tree / "src/main.py").symlink_to("../setup.py"),
    ],
}


@pytest.fixture(params=["watched", "compared"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the package watchfiles, and without it."""
    if request.param == "watched":
        pytest.importorskip("watchfiles", reason="needs the package watchfiles")
    else:
        monkeypatch.setattr(watching, "watchfiles", None)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("between", [True, False], ids=["searched between", "edits at once"])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_edits_on_disk_are_seen_by_the_next_search(
    tmp_path: Path, package: str, edits: list[Callable[[Path], object]], between: bool
) -> None:
    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        index = await GrepIndex.build(tree, tmp_path / "index")
        watcher = await Watcher.start(index)
        try:
            for edit in edits:
                edit(tree)
                if between:
                    await watcher.search(GrepQuery("rename_"))
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
            assert (watcher.rescans == 0) == (package == "watched")
        finally:
            watcher.close()

    asyncio.run(watched())


@pytest.mark.usefixtures("package")
def test_edits_before_the_start_are_seen(tmp_path: Path) -> None:
    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        index = await GrepIndex.build(tree, tmp_path / "index")
        write("src/main.py")(tree)
        write("fresh/new.py")(tree)
        (tree / "setup.py").unlink()
        watcher = await Watcher.start(index)
        try:
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
        finally:
            watcher.close()

    asyncio.run(watched())


def test_reports_that_do_not_come_cost_a_comparison_and_no_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("watchfiles", reason="needs the package watchfiles")
    monkeypatch.setattr(watching, "_MARK_S", 0.0)

    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        watcher = await Watcher.start(await GrepIndex.build(tree, tmp_path / "index"))
        try:
            (tree / "src/util/text.py").unlink()
            await watcher.search(QUERIES[0])
            make_tree(tree)  # as it was
            write("src/main.py")(tree)
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
            assert watcher.rescans > 0
        finally:
            watcher.close()

    asyncio.run(watched())


@pytest.mark.usefixtures("package")
def test_a_search_that_is_cancelled_leaves_edits_to_the_next_one(tmp_path: Path) -> None:
    async def watched() -> None:
        tree = make_tree(tmp_path / "tree")
        watcher = await Watcher.start(await GrepIndex.build(tree, tmp_path / "index"))
        try:
            write("src/main.py")(tree)
            search = asyncio.ensure_future(watcher.search(QUERIES[0]))
            await asyncio.sleep(0)
            search.cancel()
            await asyncio.wait([search])
            assert search.cancelled()
            for query in QUERIES:
                assert list((await watcher.search(query)).matches) == judged(tree, query), query
        finally:
            watcher.close()

    asyncio.run(watched())
