"""Ends processes that have used up their processor time, where the kernel does not, or not exactly.

gVisor's kernel keeps RLIMIT_CPU for the process that sets it, and forgets it in what that process starts. An
emulated guest's kernel counts ticks, of which a busy host swallows some. Clocks of processes tell it exactly,
and need not be read often: with n processors, nobody uses up s seconds in less than s / n.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from etude.sandbox.inside.processes import Processes
from etude.sandbox.inside.watch import Watch

SHORTEST_S, LONGEST_S = 0.05, 60.0
"""Bounds of the time between two looks."""
_PROCESS_CLOCK = 2
"""The kind of clock, beside the process id, in the number of a process's clock: clock_getcpuclockid(3)."""


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
