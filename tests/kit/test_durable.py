"""Atomic and durable writes of files and folders."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from etude.config import parse_config
from etude.kit.durable import (
    DRAFTS,
    make_directory,
    read_record,
    recover_directory,
    remove_directory,
    retired_path,
    whole_directory,
    whole_file,
    write_bytes,
    write_json,
    write_text,
)
from etude.kit.leftovers import sweep
from etude.observe import RunDirectory
from etude.store import FileBlobs, TrajectoryLog
from tests.store.builders import make_group


def make_run(path: Path) -> None:
    RunDirectory.create(parse_config({"runs_directory": str(path), "name": "demo"}))


@pytest.mark.parametrize(
    "make",
    [
        make_directory,
        lambda path: TrajectoryLog(path).append([make_group(0)]),
        lambda path: FileBlobs(path).put(np.zeros(3)),
        make_run,
    ],
)
def test_folders_that_are_made_on_the_way_are_as_durable_as_what_is_in_them(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "a" / "b"
    make(path)
    assert {folder for folder in (path, *path.parents[:2]) if any(folder.iterdir())} <= synced


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_keeps_its_contents_until_the_new_ones_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RuntimeError), whole_file(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert (path.read_bytes(), names_in(tmp_path)) == (b"old", ["file"])
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), names_in(tmp_path)) == (b"new", ["file"])


def test_a_link_in_the_place_of_a_file_is_replaced_and_names_may_be_long(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"other")
    link = tmp_path / ("ü" * 120)
    link.symlink_to(other)
    write_text(link, "mine")
    assert not link.is_symlink() and other.read_bytes() == b"other"
    assert link.read_text() == "mine"


def test_a_folder_appears_when_its_block_ends_well_and_not_before(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with pytest.raises(RuntimeError), whole_directory(target) as draft:
        (draft / "a").write_text("1")
        raise RuntimeError
    assert names_in(tmp_path) == []
    with whole_directory(target) as draft:
        (draft / "a").write_text("1")
        assert not target.exists()
    assert (names_in(tmp_path), names_in(target)) == (["folder"], ["a"])


def test_a_folder_that_is_there_is_refused_kept_or_makes_room(tmp_path: Path) -> None:
    target = tmp_path / "folder"

    def write(text: str, keep: Callable[[], bool] | None) -> str:
        with whole_directory(target, keep) as draft:
            (draft / "a").write_text(text)
        assert names_in(tmp_path) == ["folder"]
        return (target / "a").read_text()

    assert write("first", None) == "first"
    with pytest.raises(OSError):
        write("second", None)
    assert write("third", lambda: True) == "first"
    assert write("fourth", lambda: False) == "fourth"


REPLACED = """
import os, pathlib, signal, sys
from etude.kit.durable import replace_directory
rename, left = pathlib.Path.rename, int(sys.argv[2])
def dying(self, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
pathlib.Path.rename = dying
root = pathlib.Path(sys.argv[1])
replace_directory(root / "draft", root / "folder")
"""


@pytest.mark.parametrize(("num_renames", "contents"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_folder_in_use_is_the_old_or_the_new_one_wherever_its_replacement_is_killed(
    num_renames: int, contents: str, tmp_path: Path
) -> None:
    for name, text in (("folder", "old"), ("draft", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(text)
    subprocess.run([sys.executable, "-c", REPLACED, str(tmp_path), str(num_renames)], check=False)
    recover_directory(tmp_path / "folder")
    assert (tmp_path / "folder" / "a").read_text() == contents
    assert not retired_path(tmp_path / "folder").exists()


def test_a_folder_that_is_removed_has_no_name_while_its_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = tmp_path / "folder", list[bool]()
    (target / "a").mkdir(parents=True)
    rmtree = shutil.rmtree

    def remove(path: Path, ignore_errors: bool = False) -> None:
        seen.append(target.exists())
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    remove_directory(target)
    assert (seen, names_in(tmp_path)) == ([False], [])
    with pytest.raises(FileNotFoundError):
        remove_directory(target)
    assert names_in(tmp_path) == []


DRAFTED = """
import sys, pathlib
from etude.kit.durable import whole_directory
with whole_directory(pathlib.Path(sys.argv[1]) / "folder") as draft:
    (draft / "a").write_text("half")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_drafted_is_swept(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", DRAFTED, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        sweep(tmp_path, DRAFTS)
        assert len(names_in(tmp_path)) == 1, "a process that lives is left alone"
        process.kill()
        process.wait()
    sweep(tmp_path, DRAFTS)
    assert names_in(tmp_path) == []


def test_a_record_is_read_whole_or_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_record(path) == {}
    write_json(path, {"a": [1]})
    assert read_record(path) == {"a": [1]}
    for damaged in (path.read_bytes()[:-4], b"[1]", b"\xff", b"[" * 100_000):
        path.write_bytes(damaged)
        assert read_record(path) == {}
