"""A guest's memory out of a process: here a plain one that maps a file privately, as QEMU does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import SandboxError
from etude.sandbox.vm.state import (
    PAGE_BYTES,
    copy_sparse,
    find_mappings,
    make_sparse,
    save_memory,
)

NUM_PAGES = 600
_WRITER = """
import mmap, sys
path, pages, seed = sys.argv[1], [int(word) for word in sys.argv[3].split(",") if word], int(sys.argv[2])
with open(path, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
for page in pages:
    start = page * mmap.PAGESIZE
    value = 0 if page % 3 == 0 else (seed + page) % 255 + 1
    memory[start:start + mmap.PAGESIZE] = bytes([value]) * mmap.PAGESIZE
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page]
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def writing_process(path: Path, pages: list[int], seed: int) -> Iterator[int]:
    """A process that has written those pages of its private mapping of the file."""
    command = [sys.executable, "-c", _WRITER, str(path), str(seed), ",".join(map(str, pages))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.communicate()


def make_base(path: Path, seed: int) -> bytes:
    """A file with data in some of its first pages, and holes."""
    generator = random.Random(seed)
    make_sparse(path, NUM_PAGES * PAGE_BYTES)
    with path.open("r+b") as file:
        for page in generator.sample(range(NUM_PAGES), 60):
            file.seek(page * PAGE_BYTES)
            file.write(generator.randbytes(PAGE_BYTES))
    return path.read_bytes()


@given(st.sets(st.integers(0, NUM_PAGES - 1), max_size=200), st.integers(0, 250))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_copy_is_what_the_process_sees(tmp_path: Path, pages: set[int], seed: int) -> None:
    base, target = tmp_path / "base", tmp_path / "target"
    for path in (base, target):
        path.unlink(missing_ok=True)
    wanted = bytearray(make_base(base, seed))
    before = bytes(wanted)
    for page in pages:
        value = 0 if page % 3 == 0 else (seed + page) % 255 + 1
        wanted[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes([value]) * PAGE_BYTES
    with writing_process(base, sorted(pages), seed) as pid:
        save_memory(pid, base, target)
    assert target.read_bytes() == bytes(wanted)
    assert base.read_bytes() == before


def test_zeros_in_holes_take_no_space(tmp_path: Path) -> None:
    base, target = tmp_path / "base", tmp_path / "target"
    make_sparse(base, NUM_PAGES * PAGE_BYTES)
    with writing_process(base, list(range(0, NUM_PAGES, 3)), 1) as pid:
        save_memory(pid, base, target)
    assert target.stat().st_size == NUM_PAGES * PAGE_BYTES
    assert target.stat().st_blocks == 0


def test_holes_stay_holes_in_a_copy(tmp_path: Path) -> None:
    source = tmp_path / "source"
    data = make_base(source, 7)
    copy_sparse(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == data
    assert (tmp_path / "copy").stat().st_blocks * 512 < len(data) / 4


def test_a_copy_never_overwrites(tmp_path: Path) -> None:
    make_sparse(tmp_path / "a", 4096)
    make_sparse(tmp_path / "b", 4096)
    with pytest.raises(FileExistsError):
        copy_sparse(tmp_path / "a", tmp_path / "b")


def test_memory_that_is_not_mapped_is_an_error(tmp_path: Path) -> None:
    make_sparse(tmp_path / "ram", 4096)
    with pytest.raises(SandboxError, match="only partly mapped"):
        find_mappings(os.getpid(), tmp_path / "ram")
    with pytest.raises(SandboxError, match="cannot be read"):
        save_memory(1 << 22, tmp_path / "ram", tmp_path / "copy")
