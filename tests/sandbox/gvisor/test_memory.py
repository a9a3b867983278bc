"""A container's memory, its kernel included, is measured and limited; control groups end with their owner."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.gvisor.container import (
    KERNEL_BYTES,
    LONGEST_S,
    OVERHEAD_BYTES,
    PATIENCE_S,
    SERVER_BYTES,
    SHORTEST_S,
    STEP_BYTES,
    MemoryBound,
    MemoryFile,
)


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


def test_the_kernels_own_memory_is_what_lies_beside_its_memory_file() -> None:
    descriptor = os.memfd_create("runsc-memory")
    # Mapped anew: memory of the heap may have been resident before.
    private = mmap.mmap(-1, 20 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory = MemoryFile.of(os.getpid())
        assert memory is not None
        before = memory.kernel_bytes()
        for page in range(0, len(private), mmap.PAGESIZE):
            private[page] = 1
        assert memory.kernel_bytes() - before == pytest.approx(len(private), abs=4 << 20)
        os.ftruncate(descriptor, 30 << 20)
        with mmap.mmap(descriptor, 30 << 20) as mapped:
            for page in range(0, len(mapped), mmap.PAGESIZE):
                mapped[page] = 1
            assert memory.kernel_bytes() - before == pytest.approx(len(private), abs=4 << 20)
    finally:
        private.close()
        os.close(descriptor)
    assert MemoryFile(Path("/proc/4194305/fd/3")).kernel_bytes() == 0


LIMIT = 104 << 20
FULL = LIMIT + SERVER_BYTES


def test_within_its_limits_nothing_happens_and_looks_are_rare() -> None:
    bound = MemoryBound(1 << 30)
    for now_s in range(100):
        assert bound.check(300 << 20, 40 << 20, now_s) == "within"
        assert bound.pause_s == LONGEST_S


def test_the_nearer_the_limit_the_sooner_the_next_look() -> None:
    bound = MemoryBound(LIMIT)
    pauses: list[float] = []
    for programs_bytes in (0, FULL // 2, FULL - (1 << 20)):
        assert bound.check(programs_bytes, 10 << 20, 0.0) == "within"
        pauses.append(bound.pause_s)
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] == SHORTEST_S


def test_programs_over_their_limit_are_ended_and_then_all_is_well() -> None:
    bound = MemoryBound(LIMIT)
    assert bound.check(FULL + 1, 10 << 20, 0.0) == "over"
    assert bound.check(FULL + 1, 10 << 20, 0.1) == "waiting"
    assert bound.check(10 << 20, 10 << 20, 0.2) == "within"
    assert bound.check(FULL + 1, 10 << 20, 9.0) == "over"


def test_files_over_the_limit_are_hopeless_once_patience_is_over() -> None:
    bound = MemoryBound(LIMIT)
    assert bound.check(FULL + 1, 10 << 20, 0.0) == "over"
    assert bound.check(FULL + 1, 10 << 20, PATIENCE_S) == "waiting"
    assert bound.check(FULL + 1, 10 << 20, PATIENCE_S + 0.1) == "hopeless"


def test_what_grows_while_it_is_waited_for_is_ended_again() -> None:
    bound = MemoryBound(LIMIT)
    assert bound.check(0, FULL + KERNEL_BYTES + 1, 0.0) == "over"
    assert bound.check(0, FULL + KERNEL_BYTES + STEP_BYTES, 0.1) == "waiting"
    assert bound.check(0, FULL + KERNEL_BYTES + STEP_BYTES + 2, 0.2) == "over"


def test_a_kernel_that_gives_memory_back_late_is_tolerated_but_may_not_grow() -> None:
    bound = MemoryBound(LIMIT)
    late = FULL + KERNEL_BYTES + (8 << 20)
    assert bound.check(0, late, 0.0) == "over"
    assert bound.check(0, late, PATIENCE_S + 0.1) == "within"
    assert bound.check(0, late + STEP_BYTES, 60.0) == "within"
    assert bound.check(0, late + 3 * STEP_BYTES, 61.0) == "over"
    # What it has given back meanwhile is not its own any longer.
    assert bound.check(0, 20 << 20, 120.0) == "within"
    assert bound.check(0, late, 121.0) == "over"


def test_a_kernel_beyond_all_bounds_is_hopeless() -> None:
    bound = MemoryBound(LIMIT)
    assert bound.check(0, LIMIT + OVERHEAD_BYTES + 1, 0.0) == "over"
    assert bound.check(0, LIMIT + OVERHEAD_BYTES + 1, PATIENCE_S + 0.1) == "hopeless"


_BYTES = st.integers(0, 1 << 31)


@given(st.lists(st.tuples(_BYTES, _BYTES, st.floats(0.01, 3.0)), max_size=60))
def test_nothing_stays_beyond_the_last_bound(rows: list[tuple[int, int, float]]) -> None:
    bound = MemoryBound(LIMIT)
    now_s, since_s = 0.0, None
    for programs_bytes, kernel_bytes, pause_s in rows:
        now_s += pause_s
        verdict = bound.check(programs_bytes, kernel_bytes, now_s)
        assert SHORTEST_S <= bound.pause_s <= LONGEST_S
        if programs_bytes + kernel_bytes <= LIMIT + OVERHEAD_BYTES and programs_bytes <= FULL:
            since_s = None
            continue
        assert verdict != "within"
        since_s = now_s if since_s is None else since_s
        if verdict == "hopeless":
            return
        assert now_s - since_s <= PATIENCE_S
