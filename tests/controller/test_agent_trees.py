"""Which files of a directory the agent gets, and where it may write."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from etude.controller.agent import trees
from etude.controller.agent.changes import FileChange, TurnChange, combined
from etude.controller.agent.trees import DirectoryTree
from etude.errors import ConfigError, UserError
from etude.kit import durable
from etude.records import ToolErrorClass, ToolResult


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "repo"
    (path / "src").mkdir(parents=True)
    (path / "src" / "a.py").write_text("a\n")
    (path / "picture.bin").write_bytes(b"\0\xff\x80")
    (path / "node_modules").mkdir()
    (path / "node_modules" / "x.js").write_text("x")
    return path


def scan(root: Path) -> dict[str, bytes]:
    return dict(asyncio.run(DirectoryTree(root).scan()))


def test_binary_files_come_whole_and_links_not_at_all(root: Path) -> None:
    (root / "link.py").symlink_to(root / "src" / "a.py")
    (root / "out").symlink_to("/etc")
    (root / "pipe").unlink(missing_ok=True)
    os.mkfifo(root / "pipe")
    assert scan(root) == {"picture.bin": b"\0\xff\x80", "src/a.py": b"a\n"}


def test_git_says_which_files_count(root: Path) -> None:
    git = ("git", "-c", "init.defaultBranch=main", "init", "-q")
    subprocess.run(git, cwd=root, check=True)
    (root / ".gitignore").write_text("secret.env\nbuild/\nnode_modules/\n")
    (root / "secret.env").write_text("key")
    (root / "build").mkdir()
    (root / "build" / "out.py").write_text("out")
    assert sorted(scan(root)) == [".gitignore", "picture.bin", "src/a.py"]
    unwanted = asyncio.run(
        DirectoryTree(root).unwanted(["build/b.py", "src/b.py", "secret.env", ".git/hooks/x"])
    )
    assert unwanted == {"build/b.py", "secret.env", ".git/hooks/x"}


def test_nothing_is_taken_from_a_work_tree_of_which_git_does_not_answer(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(("git", "-c", "init.defaultBranch=main", "init", "-q"), cwd=root, check=True)
    (root / ".gitignore").write_text("secret.env\n")
    (root / "secret.env").write_text("key")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(ConfigError, match="ownership"):
        scan(root)
    with pytest.raises(ConfigError, match="ownership"):
        asyncio.run(DirectoryTree(root / "src").unwanted(["secret.env"]))
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(ConfigError, match="work tree"):
        scan(root)


def test_what_the_repository_configures_for_git_is_not_run(root: Path) -> None:
    subprocess.run(("git", "-c", "init.defaultBranch=main", "init", "-q"), cwd=root, check=True)
    monitor = root / "monitor"
    monitor.write_text("#!/bin/sh\ntouch ran\n")
    monitor.chmod(0o755)
    subprocess.run(("git", "config", "core.fsmonitor", str(monitor)), cwd=root, check=True)
    scan(root)
    assert not (root / "ran").exists()


def test_a_directory_that_is_too_large_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_BYTES", 4)
    with pytest.raises(ConfigError, match="holds more than"):
        scan(root)
    monkeypatch.setattr(trees, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(trees, "MAX_FILES", 1)
    with pytest.raises(ConfigError, match="holds more than"):
        scan(root)


def test_large_files_are_left_out_and_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_FILE_BYTES", 2)
    tree = DirectoryTree(root)
    assert dict(asyncio.run(tree.scan())) == {"src/a.py": b"a\n"}
    assert tree.left_out == ["picture.bin"]


@pytest.mark.parametrize("path", ["none", "src/a.py"])
def test_what_is_no_directory_is_refused(root: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        DirectoryTree(root / path)


@pytest.mark.parametrize(
    "path",
    [
        "../outside.py",
        "/tmp/outside.py",
        "link/outside.py",
        ".git/hooks/pre-commit",
        "src",
        "",
        "a/../../b",
        "to.py",
    ],
)
def test_nothing_is_written_outside_of_the_directory_or_through_links(root: Path, path: str) -> None:
    (root / "link").symlink_to(root.parent)
    (root / "to.py").symlink_to(root.parent / "outside.py")
    tree = DirectoryTree(root)
    with pytest.raises(UserError):
        asyncio.run(tree.write(path, b"stolen"))
    with pytest.raises(UserError):
        asyncio.run(tree.remove(path))
    assert asyncio.run(tree.read(path)) is None
    assert not (root.parent / "outside.py").exists()


@pytest.mark.parametrize("mode", [0o755, 0o600])
def test_a_file_has_its_permissions_from_the_moment_that_it_is_there(
    mode: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may look in between, and whoever is killed there leaves it as it is to be."""
    (root / "src" / "a.py").chmod(mode)
    modes: list[int] = []

    def see(folder: Path) -> None:
        modes.append((folder / "a.py").stat().st_mode & 0o7777)

    monkeypatch.setattr(durable, "sync_path", see)
    asyncio.run(DirectoryTree(root).write("src/a.py", b"b\n"))
    assert modes == [mode] and (root / "src" / "a.py").read_bytes() == b"b\n"


def test_a_file_keeps_its_permissions_and_empty_folders_go(root: Path) -> None:
    (root / "src" / "a.py").chmod(0o755)
    tree = DirectoryTree(root)
    asyncio.run(tree.write("src/a.py", b"b\n"))
    assert (root / "src" / "a.py").stat().st_mode & 0o777 == 0o755
    assert (root / "src" / "a.py").read_bytes() == b"b\n"
    asyncio.run(tree.remove("src/a.py"))
    assert not (root / "src").exists()


def test_a_change_survives_its_record() -> None:
    files = (FileChange("a", b"\0\xff", None), FileChange("b", None, "é\n".encode()))
    results = (ToolResult("out", ToolErrorClass.TIMEOUT, facts={"path": "a"}),)
    change = TurnChange(1, 2, 3, files, results, written=False, undone=True)
    assert TurnChange.from_dict(change.to_dict()) == change


def test_changes_add_up() -> None:
    first = TurnChange(1, 1, 1, (FileChange("a", b"1", b"2"), FileChange("b", None, b"x")))
    second = TurnChange(2, 2, 1, (FileChange("a", b"2", b"3"), FileChange("b", b"x", None)))
    undone = TurnChange(3, 3, 1, (FileChange("c", None, b"y"),), undone=True)
    assert combined([first, second, undone]) == (FileChange("a", b"1", b"3"),)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (None, b"", "Empty file a added\n"),
        (b"\0", b"\1\0", "Binary file a changed\n"),
        (b"a\n\x0c\nb\r\n", b"a\n\x0c\nc\r\n", "--- a/a\n+++ b/a\n@@ -1,3 +1,3 @@\n a\n \x0c\n-b\r\n+c\r\n"),
        (b"x", None, "--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n"),
    ],
)
def test_every_change_can_be_shown(before: bytes | None, after: bytes | None, shown: str) -> None:
    assert FileChange("a", before, after).diff() == shown
