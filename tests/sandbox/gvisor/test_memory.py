"""What a container holds is read from its memory file; control groups go with their owner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.sandbox.gvisor.memory import ControlGroup, MemoryFile


def test_the_memory_file_of_a_process_is_found_and_measured() -> None:
    descriptor = os.memfd_create("runsc-memory")
    try:
        memory = MemoryFile.of(os.getpid())
        assert memory is not None
        before = memory.used_bytes()
        os.write(descriptor, b"x" * (3 << 20))
        assert memory.used_bytes() - before == 3 << 20
    finally:
        os.close(descriptor)
    assert memory.used_bytes() == 0


def test_a_process_without_one_or_that_has_ended_has_none() -> None:
    assert MemoryFile.of(os.getpid()) is None
    assert MemoryFile.of(2**22 + 1) is None


def test_without_a_hierarchy_there_is_no_group(tmp_path: Path) -> None:
    assert ControlGroup.make("box", 1 << 20, 1.0, tmp_path / "none") is None


def test_a_hierarchy_whose_limit_cannot_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").touch()
    # A name too long for any file system stands for a directory that may not be made.
    assert ControlGroup.make("x" * 300, 1 << 20, 1.0, tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.procs"]


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    made = ControlGroup.make("test", 64 << 20, 0.5)
    if made is None:
        pytest.skip("no memory control group may be made here")
    yield made
    made.remove()


def test_a_group_bounds_and_is_removed(group: ControlGroup) -> None:
    memory = group.paths[0]
    limits = [memory / name for name in ("memory.limit_in_bytes", "memory.max")]
    assert [int(limit.read_text()) for limit in limits if limit.exists()] == [64 << 20]
    shares = [path / "cpu.shares" for path in group.paths if (path / "cpu.shares").exists()]
    assert all(int(path.read_text()) == 512 for path in shares)
    assert all(path.exists() for path in group.processes)
    group.remove()
    assert not any(path.exists() for path in group.paths)
    group.remove()


def test_groups_of_dead_owners_are_swept(group: ControlGroup) -> None:
    orphan = group.paths[0].parent / "gvisor-etude-4194304-1-box"
    orphan.mkdir()
    second = ControlGroup.make("second", 64 << 20, 1.0)
    assert second is not None
    assert not orphan.exists()
    assert group.paths[0].exists()
    second.remove()
