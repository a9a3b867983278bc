"""Files of a killed owner are removed by the next, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.kit.leftovers import is_owner_alive, owner_tag, work_directory

SOURCE = str(Path(__file__).parents[2] / "src")
OWNER = """
import sys
from pathlib import Path
from etude.kit.leftovers import work_directory
work = work_directory(Path(sys.argv[1]))
(work.path / "socket").write_text("x")
print(work.path.name, flush=True)
sys.stdin.read()
"""


def test_this_process_is_alive_and_its_tag_says_when_it_began() -> None:
    assert is_owner_alive(owner_tag())
    assert is_owner_alive(f"{owner_tag()}-anything")
    pid, _, start = owner_tag().partition("-")
    assert (int(pid), int(start) > 0) == (os.getpid(), True)


@pytest.mark.parametrize("name", ["", "x", "12", "12-", "-12", "a-b", "1.5-2"])
def test_a_name_without_a_tag_has_no_owner(name: str) -> None:
    assert not is_owner_alive(name)


def test_a_later_process_of_the_same_number_is_not_the_owner() -> None:
    assert not is_owner_alive(f"{os.getpid()}-1")


def test_a_zombie_is_dead() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from etude.kit.leftovers import owner_tag; print(owner_tag())"],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        tag = process.stdout.readline().decode().strip()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_owner_alive(tag)


def test_directories_of_dead_owners_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    root = tmp_path / "a" / "work"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCE},
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        theirs = owner.stdout.readline().decode().strip()
        (root / "snapshots").mkdir()
        (root / "work-left").mkdir()
        mine = work_directory(root)
        assert sorted(path.name for path in root.iterdir()) == sorted([theirs, mine.path.name, "snapshots"])
        owner.kill()
        owner.wait()
    second = work_directory(root)
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [mine.path.name, second.path.name, "snapshots"]
    )
    assert mine.path != second.path
    for work in (mine, second, second):
        work.close()
    assert [path.name for path in root.iterdir()] == ["snapshots"]


def test_a_work_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    work = work_directory(tmp_path / "w")
    assert work.path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700
