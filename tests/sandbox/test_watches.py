"""Limits that a guest's server enforces itself: processor time, and a memory reserve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.inside.processes import Process, Table
from etude.sandbox.inside.watches import (
    SHORTEST_S,
    MemoryFloor,
    ProcessorWatch,
    available_bytes,
    processor_time_s,
)


class Burners:
    """Processes that use processor time as told, on a clock of their own."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.now_s = 0.0
        self.rates = rates
        """pid -> processors in use."""
        self.used_s = dict.fromkeys(rates, 0.0)
        self.killed: dict[int, float] = {}
        """pid -> what it had used."""
        self.num_looks = 0

    def table(self) -> Table:
        self.num_looks += 1
        return {pid: Process(1, pid, "Z" if pid in self.killed else "R") for pid in self.rates}

    def kill_all(self) -> None:
        raise AssertionError("nobody asked for that")

    def kill(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        assert pid not in self.killed, "it is dead already"
        self.killed[pid] = self.used_s[pid]

    def wait(self, timeout_ms: float) -> None:
        self.now_s += timeout_ms / 1e3
        for pid, rate in self.rates.items():
            if pid not in self.killed:
                self.used_s[pid] += rate * timeout_ms / 1e3


@given(
    rates=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=5),
    limit_s=st.integers(1, 100),
    until_s=st.floats(1.0, 300.0),
)
def test_nobody_gets_more_than_its_processor_time(rates: list[float], limit_s: int, until_s: float) -> None:
    burners = Burners(dict(enumerate(rates, 10)))
    watch = ProcessorWatch(
        burners, limit_s, 2, lambda pid: burners.used_s[pid], lambda: burners.now_s, burners.kill
    )
    while burners.now_s < until_s:
        burners.wait(watch.limit_timeout(None))
        watch.check()
    most_s = limit_s + 2 * (SHORTEST_S + 0.002)
    assert all(used_s <= most_s for used_s in burners.used_s.values())
    assert all(used_s >= limit_s for used_s in burners.killed.values())
    over = {pid for pid, rate in burners.rates.items() if rate * (burners.now_s - SHORTEST_S) > most_s}
    assert over <= set(burners.killed)


def test_idle_processes_are_looked_at_rarely() -> None:
    burners = Burners({10: 0.0})
    watch = ProcessorWatch(burners, 60, 2, lambda pid: 0.0, lambda: burners.now_s, burners.kill)
    while burners.now_s < 3600.0:
        burners.wait(watch.limit_timeout(None))
        watch.check()
    assert burners.num_looks <= 3600 / 30 + 2


def test_whoever_waits_less_is_not_kept_waiting() -> None:
    burners = Burners({})
    watch = ProcessorWatch(burners, 60, 2, lambda pid: None, lambda: burners.now_s, burners.kill)
    watch.check()
    assert watch.limit_timeout(5.0) == 5.0
    assert 29_000 < watch.limit_timeout(None) < 31_000


def test_processor_time_of_another_process_is_the_kernels() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as burner:
        try:
            end_s = time.monotonic() + 60.0
            while (processor_time_s(burner.pid) or 0.0) < 0.2 and time.monotonic() < end_s:
                time.sleep(0.01)
            before_s = processor_time_s(burner.pid)
            fields = Path(f"/proc/{burner.pid}/stat").read_text().rpartition(")")[2].split()
            ticks_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            after_s = processor_time_s(burner.pid)
            assert before_s is not None and after_s is not None
            assert before_s - 0.2 <= ticks_s <= after_s + 0.2
        finally:
            burner.kill()
    assert processor_time_s(burner.pid) is None


class Hogs:
    """A guest whose agent fills memory at some rate until its processes are killed."""

    def __init__(self, total_bytes: int, bytes_per_s: float) -> None:
        self.now_s = 0.0
        self.available_bytes = float(total_bytes)
        self.num_kills = 0
        self._total_bytes = total_bytes
        self._bytes_per_s = bytes_per_s

    def table(self) -> Table:
        raise AssertionError("nobody asked for that")

    def kill_all(self) -> None:
        self.num_kills += 1
        self.available_bytes = self._total_bytes

    def wait(self, timeout_ms: float) -> None:
        self.now_s += timeout_ms / 1e3
        self.available_bytes -= self._bytes_per_s * timeout_ms / 1e3


@given(total_mib=st.integers(64, 4096), mib_per_s=st.floats(1.0, 150.0))
def test_memory_is_never_used_up_however_slowly_it_is_filled(total_mib: int, mib_per_s: float) -> None:
    hogs = Hogs(total_mib << 20, mib_per_s * (1 << 20))
    floor = MemoryFloor(hogs, 12 << 20, lambda: int(hogs.available_bytes), lambda: hogs.now_s)
    for _ in range(3000):
        hogs.wait(floor.limit_timeout(None))
        assert hogs.available_bytes > 0
        floor.check()
        assert hogs.available_bytes >= 12 << 20
    assert hogs.num_kills > 0 or hogs.now_s * mib_per_s <= total_mib


def test_available_memory_is_read_from_the_kernel() -> None:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() < total_bytes
