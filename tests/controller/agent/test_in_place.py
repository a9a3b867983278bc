"""In-place editing: backups of files before edit tools change them, and search of the directory."""

import asyncio
from pathlib import Path

import pytest

from etude.agent.index.directory import DirectorySearch
from etude.agent.tools.ports import GrepRequest
from etude.controller.agent import in_place
from etude.controller.agent.changes import FileChange
from etude.controller.agent.in_place import InPlace
from etude.controller.agent.trees import LEFT_OUT_NAMES, DirectoryTree
from etude_quickstart.memory_backend import MemoryBackend
from tests.controller.agent_builders import run


def changed(mirror: InPlace) -> tuple[FileChange, ...]:
    return run(mirror.changes())


def test_a_file_is_kept_as_it_was_before_the_first_call_of_a_turn(tmp_path: Path) -> None:
    mirror = InPlace(DirectoryTree(tmp_path))
    (tmp_path / "a").write_text("1")
    assert mirror.record_originals(["a", "new"]) == (
        FileChange("a", b"1", b"1"),
        FileChange("new", None, None),
    )
    (tmp_path / "a").write_text("2")
    assert mirror.record_originals(["a"])[0].before == b"1"
    (tmp_path / "new").write_text("3")
    assert changed(mirror) == (FileChange("a", b"1", b"2"), FileChange("new", None, b"3"))
    assert changed(mirror) == ()


def test_a_link_stands_for_the_file_that_is_written_and_one_that_leaves_for_none(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "secret").write_text("theirs")
    (project / "a").write_text("1")
    (project / "link").symlink_to("a")
    (project / "away").symlink_to("../secret")
    mirror = InPlace(DirectoryTree(project))
    assert mirror.record_originals(["link", "away", "../secret", "."]) == (FileChange("a", b"1", b"1"),)


def test_of_a_directory_its_files_are_kept_unless_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "a").write_text("1")
    (tmp_path / "d" / "link").symlink_to("e/a")
    mirror = InPlace(DirectoryTree(tmp_path))
    assert mirror.record_originals(["d"]) == (FileChange("d/e/a", b"1", b"1"),)
    changed(mirror)
    monkeypatch.setattr(in_place, "MAX_TOUCHED_BYTES", 10)
    assert mirror.record_originals(["d"]) == ()


def test_nothing_is_read_of_a_large_directory(tmp_path: Path) -> None:
    """No size is too large in place, and nothing is scanned."""
    (tmp_path / "large").write_bytes(b"x" * (in_place.MAX_FILE_BYTES + 1))
    mirror = InPlace(DirectoryTree(tmp_path))
    run(mirror.load())
    assert run(mirror.pull()) == [] and not mirror.box
    assert mirror.record_originals(["large"]) == ()
    assert mirror.make_template({}, None).workspace == str(tmp_path.resolve())


def test_search_passes_over_what_git_ignores_hides_or_is_no_source(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for path in ("src/a.py", "build/b.py", "venv/c.py", ".git/d.py", ".hidden.py", "src/e.txt"):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text("one\nNeedle\n")
    (project / ".gitignore").write_text("build/\n")
    (tmp_path / "outside.py").write_text("needle of somebody else\n")
    (project / "link").symlink_to(tmp_path)

    async def go() -> list[list[str]]:
        sandbox = await MemoryBackend().create()
        search = DirectorySearch(sandbox, project.resolve(), LEFT_OUT_NAMES)
        requests = (
            GrepRequest("needle", ignore_case=True),
            GrepRequest("Needle", globs=("*.py",)),
            GrepRequest("Needle", path="src/e.txt"),
            GrepRequest("needle", path="build", ignore_case=True),
        )
        found = [[match.path for match in await search.grep(request)] for request in requests]
        with pytest.raises(Exception, match="no such"):
            await search.grep(GrepRequest("needle", path="link"))
        return found

    assert asyncio.run(go()) == [["src/a.py", "src/e.txt"], ["src/a.py"], ["src/e.txt"], ["build/b.py"]]
