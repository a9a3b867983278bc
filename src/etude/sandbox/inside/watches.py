"""Periodic checks in the poll loop of a guest's server: limits of processor time, and a floor of free memory.

gVisor's kernel applies RLIMIT_CPU to the process that sets it, but not to its children. The kernel of an
emulated guest counts ticks, some of which are lost on a busy host. Process clocks are exact, and need not be
read often: with n processors, a process cannot use s seconds in less than s / n.

The guest's kernel would also kill a process when memory is used up, but only after it has evicted the pages
of all programs again and again: for minutes nothing responds. The floor is for guests whose whole memory is
the sandbox's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

from etude.sandbox.inside.processes import Processes

SHORTEST_S, LONGEST_S = 0.05, 60.0
"""Bounds of the time between two checks."""
_LONGEST_FLOOR_S = 0.25
"""Upper bound of that time for memory."""
_PROCESS_CLOCK = 2
"""The clock type in the number of a process's clock, next to the process id: clock_getcpuclockid(3)."""
_FASTEST_BYTES_PER_S = 1 << 30
"""Assumed maximal rate at which programs fill memory; in emulated guests it is 0.3 GiB/s."""
_CURRENT, _FUTURE, _ON_FAULT = 1, 2, 4


class Watch:
    """A periodic check. It does not block: the loop waits as `limit_timeout` says, then calls `check`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_s = clock()

    def limit_timeout(self, timeout_ms: float | None) -> float:
        """The loop's timeout, bounded by the time until the next check. Milliseconds."""
        until_ms = max(0.0, self._next_s - self._clock()) * 1e3 + 1.0
        return until_ms if timeout_ms is None else min(timeout_ms, until_ms)

    def check(self) -> None:
        """Runs the check if it is due."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + self._check()

    def _check(self) -> float:
        """Performs the check. Returns the time until the next one in seconds."""
        raise NotImplementedError


def processor_time_s(pid: int) -> float | None:
    """Processor time of a process with all its threads; None if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return None


class ProcessorWatch(Watch):
    """Kills each process that has exceeded its processor time, as RLIMIT_CPU would."""

    def __init__(
        self,
        processes: Processes,
        limit_s: float,
        num_processors: int | None = None,
        used_s: Callable[[int], float | None] = processor_time_s,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[int, int], None] = os.kill,
    ) -> None:
        """`limit_s`: of each process. `num_processors` None: those of this machine."""
        super().__init__(clock)
        self._processes = processes
        self._limit_s = limit_s
        self._num_processors = num_processors or os.cpu_count() or 1
        self._used_s = used_s
        self._kill = kill

    def _check(self) -> float:
        most_s = 0.0
        for pid, row in self._processes.table().items():
            used_s = None if row.state in "ZX" else self._used_s(pid)
            if used_s is None:
                continue
            if used_s >= self._limit_s:
                self._end(pid)
            else:
                most_s = max(most_s, used_s)
        pause_s = (self._limit_s - most_s) / self._num_processors
        return min(LONGEST_S, max(SHORTEST_S, pause_s))

    def _end(self, pid: int) -> None:
        try:
            self._kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def available_bytes() -> int:
    """Memory available to programs without evicting pages in use. Raises OSError."""
    with open("/proc/meminfo", "rb") as file:
        rows = file.read().split(b"\n")
    return next(int(row.split()[1]) for row in rows if row.startswith(b"MemAvailable:")) * 1024


def keep_in_memory() -> None:
    """Locks all present and future pages of this process in memory (mlockall). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(ctypes.c_int(_CURRENT | _FUTURE | _ON_FAULT)) != 0:
        raise OSError(ctypes.get_errno(), "mlockall")


class MemoryFloor(Watch):
    """Kills all of the agent's processes when available memory is below a floor."""

    def __init__(
        self,
        processes: Processes,
        floor_bytes: int,
        available: Callable[[], int] = available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._processes = processes
        self._floor_bytes = floor_bytes
        self._available = available

    def _check(self) -> float:
        room_bytes = self._available() - self._floor_bytes
        if room_bytes < 0:
            self._processes.kill_all()
        return min(_LONGEST_FLOOR_S, max(SHORTEST_S, room_bytes / _FASTEST_BYTES_PER_S))
