"""Ends the agent's processes before a guest's memory is used up altogether.

The guest's kernel would end one of them too, but only after it has thrown out every page of every program
again and again: for minutes nothing answers. For a guest of its own, whose whole memory is the sandbox's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from etude.sandbox.inside.processes import Processes
from etude.sandbox.inside.watch import Watch

SHORTEST_S, LONGEST_S = 0.05, 0.25
"""Bounds of the time between two looks."""
_FASTEST_BYTES_PER_S = 1 << 30
"""How fast programs are taken to fill memory; an emulated guest's fill 0.3 GiB/s."""
_CURRENT, _FUTURE, _ON_FAULT = 1, 2, 4


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
        return min(LONGEST_S, max(SHORTEST_S, room_bytes / _FASTEST_BYTES_PER_S))
