"""What the server of a guest looks after from time to time, in a loop that waits for other things: processes
that have used up their processor time, and the last of the memory.

gVisor's kernel keeps RLIMIT_CPU for the process that sets it, and forgets it in what that process starts. An
emulated guest's kernel counts ticks, of which a busy host swallows some. Clocks of processes tell it exactly,
and need not be read often: with n processors, nobody uses up s seconds in less than s / n.

The guest's kernel would end a process too when memory is used up, but only after it has thrown out every page
of every program again and again: for minutes nothing answers. For a guest of its own, whose whole memory is
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
"""Bounds of the time between two looks."""
_LONGEST_FLOOR_S = 0.25
"""The same for memory."""
_PROCESS_CLOCK = 2
"""The kind of clock, beside the process id, in the number of a process's clock: clock_getcpuclockid(3)."""
_FASTEST_BYTES_PER_S = 1 << 30
"""How fast programs are taken to fill memory; an emulated guest's fill 0.3 GiB/s."""
_CURRENT, _FUTURE, _ON_FAULT = 1, 2, 4


class Watch:
    """Looks when it is time to; waits for nothing. Its loop asks `sooner` for how long, and calls `look`
    afterwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_s = clock()

    def sooner(self, timeout_ms: float | None) -> float:
        """How long one may wait who would wait so long otherwise. Milliseconds."""
        until_ms = max(0.0, self._next_s - self._clock()) * 1e3 + 1.0
        return until_ms if timeout_ms is None else min(timeout_ms, until_ms)

    def look(self) -> None:
        """Looks, once it is time to."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + self._look()

    def _look(self) -> float:
        """Does what is to be done. Returns the time until the next look, seconds."""
        raise NotImplementedError


def processor_time_s(pid: int) -> float | None:
    """What a process with all its threads has used; None: it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return None


class ProcessorWatch(Watch):
    """Kills each process that has used more than its time, as RLIMIT_CPU would."""

    def __init__(
        self,
        processes: Processes,
        limit_s: float,
        num_processors: int | None = None,
        used_s: Callable[[int], float | None] = processor_time_s,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[int, int], None] = os.kill,
    ) -> None:
        """`limit_s`: of each process. `num_processors`: None: as many as this machine has."""
        super().__init__(clock)
        self._processes = processes
        self._limit_s = limit_s
        self._num_processors = num_processors or os.cpu_count() or 1
        self._used_s = used_s
        self._kill = kill

    def _look(self) -> float:
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
    """What programs could still get without anything being thrown out that is in use. Raises OSError."""
    with open("/proc/meminfo", "rb") as file:
        rows = file.read().split(b"\n")
    return next(int(row.split()[1]) for row in rows if row.startswith(b"MemAvailable:")) * 1024


def keep_in_memory() -> None:
    """What this process has touched, or will touch, is never thrown out. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(ctypes.c_int(_CURRENT | _FUTURE | _ON_FAULT)) != 0:
        raise OSError(ctypes.get_errno(), "mlockall")


class MemoryFloor(Watch):
    """Kills the agent's processes, all of them, when less than a floor is available."""

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

    def _look(self) -> float:
        room_bytes = self._available() - self._floor_bytes
        if room_bytes < 0:
            self._processes.kill_all()
        return min(_LONGEST_FLOOR_S, max(SHORTEST_S, room_bytes / _FASTEST_BYTES_PER_S))
