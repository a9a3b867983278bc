"""The memory watchdog: measures the processes of a sandbox, as far as no control group bounds them."""

from __future__ import annotations

import contextlib
import re
import time

from etude.sandbox.inside.processes import Processes, own_bytes, proportional_bytes
from etude.sandbox.inside.settings import Settings

WATCH_S = 0.1
"""Interval between two measurements."""
LOCKS_S = 1.0
"""Interval for file locks: the kernel waits for all processors before it lists them."""
LOCKS_BYTES = 1 << 20
"""Limit of that list: some 20,000 locks."""
_ELSEWHERE = re.compile(rb" -\d")
"""Marks a row whose lock belongs to no process: such locks are listed in all sandboxes."""


class MemoryWatch:
    """Decides when to measure, and whether the limit is exceeded."""

    def __init__(self, processes: Processes, settings: Settings) -> None:
        self.next_s = 0.0
        """Time of the next measurement, on the monotonic clock."""
        self._next_locks_s = time.monotonic() + LOCKS_S
        self._processes = processes
        self._settings = settings

    def schedule_next(self, now_s: float) -> None:
        """Schedules the next measurement in `WATCH_S`."""
        self.next_s = now_s + WATCH_S

    def is_exceeded(self) -> bool:
        """Whether the processes exceed the memory limit; may postpone the next measurement."""
        most, with_shared = self._settings.memory_bytes, not self._settings.has_groups
        if self._holds_many_locks():
            return True
        table = self._processes.table()
        # The quick count overestimates: it counts pages that forks share once for each, and every socket as
        # full. It only decides whether an exact count is needed.
        sockets = self._settings.sockets
        quick_bytes = own_bytes(table, with_shared)
        if quick_bytes + (sockets.max_bytes() if sockets else 0) <= most:
            return False
        start_s = time.monotonic()
        used_bytes = sockets.used_bytes() if sockets else 0
        if quick_bytes + used_bytes > most:
            used_bytes += proportional_bytes(table, with_shared)
        if used_bytes > most:
            return True
        # Forks that share much need exact counts each time: they get at most a tenth of the time.
        end_s = time.monotonic()
        self.next_s = end_s + max(WATCH_S, 9 * (end_s - start_s))
        return False

    def _holds_many_locks(self) -> bool:
        """File locks take kernel memory that no control group counts, and a process may hold any number."""
        now_s = time.monotonic()
        if now_s < self._next_locks_s:
            return False
        self._next_locks_s = now_s + LOCKS_S
        with contextlib.suppress(OSError), open("/proc/locks", "rb") as file:
            num_bytes = 0
            for row in file:
                num_bytes += 0 if _ELSEWHERE.search(row) else len(row)
                if num_bytes >= LOCKS_BYTES:
                    return True
        return False
