"""Looks at the memory of all that runs in a sandbox, as far as no control group bounds it."""

from __future__ import annotations

import contextlib
import re
import time

from etude.sandbox.inside.processes import Processes, own_bytes, proportional_bytes
from etude.sandbox.inside.settings import Settings

WATCH_S = 0.1
"""How often the memory of running processes is looked at."""
LOCKS_S = 1.0
"""How often their locks are: the kernel waits for all processors before it lists them."""
LOCKS_BYTES = 1 << 20
"""Of that list: some 20,000 locks."""
_ELSEWHERE = re.compile(rb" -\d")
"""In a row whose lock belongs to no process: these are listed in all sandboxes, whichever holds them."""


class MemoryWatch:
    """When to look next, and whether it is too much."""

    def __init__(self, processes: Processes, settings: Settings) -> None:
        self.next_s = 0.0
        """Monotonic."""
        self._next_locks_s = time.monotonic() + LOCKS_S
        self._processes = processes
        self._settings = settings

    def put_off(self, now_s: float) -> None:
        """Looks next in a while."""
        self.next_s = now_s + WATCH_S

    def is_exceeded(self) -> bool:
        """Whether the processes hold more than the sandbox may; may put off the next look."""
        most, with_shared = self._settings.memory_bytes, not self._settings.has_groups
        if self._holds_many_locks():
            return True
        table = self._processes.table()
        # The quick count takes what forks share for each one's own, and each socket for a full one: it only
        # tells when to look closely.
        sockets = self._settings.sockets
        quick_bytes = own_bytes(table, with_shared)
        if quick_bytes + (sockets.most_bytes() if sockets else 0) <= most:
            return False
        start_s = time.monotonic()
        used_bytes = sockets.held_bytes() if sockets else 0
        if quick_bytes + used_bytes > most:
            used_bytes += proportional_bytes(table, with_shared)
        if used_bytes > most:
            return True
        # Forks that share much are looked at closely all the time: at most a tenth of it.
        end_s = time.monotonic()
        self.next_s = end_s + max(WATCH_S, 9 * (end_s - start_s))
        return False

    def _holds_many_locks(self) -> bool:
        """Locks on files are memory that no control group counts, and one process may have any number."""
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
