"""Edits are found at once, by ripgrep's rules, and leave the shared index as it is."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from grep_builders import judged, make_tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.index.grep import GrepIndex, GrepQuery, Overlay
from etude.errors import ConfigError

QUERIES = [
    GrepQuery("rename_"),
    GrepQuery("new_name"),
    GrepQuery("e"),
    GrepQuery("rename_", globs=("*.py",)),
    GrepQuery("rename_|new_name", path="src"),
    GrepQuery("n", limit=3),
    GrepQuery("rename_", globs=("!src/",)),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> GrepIndex:
    where = tmp_path_factory.mktemp("overlay")
    return asyncio.run(GrepIndex.build(make_tree(where / "tree"), where / "index"))


class Edited:
    """An overlay, and beside it a copy of the tree in which the same edits are made on disk."""

    def __init__(self, index: GrepIndex, copy: Path) -> None:
        self.overlay: Overlay = index.overlay()
        self.copy = copy
        if not copy.exists():
            shutil.copytree(index.root, copy, symlinks=True)

    def write(self, path: str, content: bytes) -> None:
        self.overlay.write(path, content)
        target = self.copy / path
        for above in reversed(target.parents[: len(Path(path).parts) - 1]):
            if above.is_file():
                above.unlink()
        if target.is_dir():
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def remove(self, path: str) -> None:
        self.overlay.remove(path)
        target = self.copy / path
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()

    def check(self) -> None:
        async def searches() -> None:
            for query in QUERIES:
                if query.path and (self.copy / query.path).is_file():
                    continue  # of a binary file by name, ripgrep's JSON shows more than its command line
                found = (await self.overlay.search(query)).matches
                assert found == judged(self.copy, query)[: query.limit], query

        asyncio.run(searches())
        self.overlay.close()


@pytest.fixture
def edited(shared: GrepIndex, tmp_path: Path) -> Edited:
    return Edited(shared, tmp_path / "copy")


def test_a_changed_file_is_found_by_its_new_text_only(edited: Edited) -> None:
    edited.write("src/main.py", b"def new_name():\n    pass\n")
    edited.check()


@pytest.mark.slow
def test_a_new_file_is_found(edited: Edited) -> None:
    edited.write("src/deep/er/new.py", b"new_name = rename_window\n")
    edited.check()


def test_a_removed_directory_is_gone_and_may_come_back(edited: Edited) -> None:
    edited.remove("src")
    edited.write("src/only.py", b"new_name = 1\n")
    edited.check()


def test_a_file_may_become_a_directory_and_a_directory_a_file(edited: Edited) -> None:
    edited.write("setup.py/inner.py", b"new_name = 1\n")
    edited.write("docs", b"rename_docs\n")
    edited.check()


@pytest.mark.parametrize("name", ["logs/new.log", ".secret", ".hidden/more.py", "src/.hidden/x.py"])
def test_new_files_are_found_unless_they_are_hidden(edited: Edited, name: str) -> None:
    edited.write(name, b"new_name\n")
    edited.check()


def test_binary_and_utf16_edits_are_read_as_ripgrep_does(edited: Edited) -> None:
    edited.write("src/main.py", b"rename_early\n\0rename_late\n")
    edited.write("new.txt", "new_name ü\n".encode("utf-16"))
    edited.check()


def test_overlays_do_not_see_each_other(shared: GrepIndex) -> None:
    async def searches() -> None:
        with shared.overlay() as one, shared.overlay() as other:
            one.write("src/main.py", b"only_in_one\n")
            assert len((await one.search(GrepQuery("only_in_one"))).matches) == 1
            assert len((await other.search(GrepQuery("only_in_one"))).matches) == 0
            assert len((await shared.search(GrepQuery("only_in_one"))).matches) == 0

    asyncio.run(searches())


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a//b", "", "a/./b", "a\0b"])
def test_paths_outside_are_refused(shared: GrepIndex, path: str) -> None:
    with shared.overlay() as overlay, pytest.raises(ConfigError):
        overlay.write(path, b"")


def test_a_closed_overlay_leaves_no_files(shared: GrepIndex) -> None:
    overlay = shared.overlay()
    overlay.write("x.py", b"x")
    assert overlay.mirror is not None
    mirror = overlay.mirror
    overlay.close()
    assert not mirror.exists()


def test_an_overlay_that_is_closed_in_a_search_is_left_whole_for_it(tmp_path: Path) -> None:
    async def searched() -> None:
        tree = make_tree(tmp_path / "tree")
        overlay = (await GrepIndex.build(tree, tmp_path / "index")).overlay()
        changes = {"src/main.py": b"new_name = 1\n", "fresh/new.py": b"new_name = 2\n"}
        make_tree(tree, changes)
        for path, content in changes.items():
            overlay.write(path, content)
        searching = asyncio.ensure_future(overlay.search(GrepQuery("new_name")))
        await asyncio.sleep(0)
        overlay.close()
        assert (await searching).matches == judged(tree, GrepQuery("new_name"))
        assert overlay.mirror is None

    asyncio.run(searched())


NAMES = st.sampled_from(
    [
        "setup.py",
        "src/main.py",
        "src/util/text.py",
        "a/b.py",
        "a/b/x.py",
        "new.py",
        "src/new/n.py",
        "docs",
        "src",
        "a",
    ]
)
EDITS = st.one_of(
    st.tuples(st.just("write"), NAMES, st.sampled_from([b"new_name\n", b"rename_x\n", b"", b"new_name\0\n"])),
    st.tuples(st.just("remove"), NAMES),
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDITS, min_size=1, max_size=6))
def test_any_edits_agree_with_ripgrep_on_a_tree_edited_alike(
    shared: GrepIndex, tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[object, ...]]
) -> None:
    edited = Edited(shared, tmp_path_factory.mktemp("edits") / "copy")
    for action, *arguments in edits:
        getattr(edited, str(action))(*arguments)
    edited.check()
