"""What a control group says of processes that the kernel ended for want of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path


def num_oom_kills(group: Path) -> int:
    """Processes of a group that the kernel has ended because the group's memory was used up; 0 if it is gone.

    Version 2 counts in `memory.events`, version 1 in `memory.oom_control`.
    """
    return _count(group / "memory.events", "oom_kill") or _count(group / "memory.oom_control", "oom_kill")


def reached_limit(group: Path) -> bool:
    """Whether the group itself has been at its limit: not, where the whole machine lacked memory.

    Version 2 counts in `memory.events`, version 1 in `memory.failcnt`.
    """
    if _count(group / "memory.events", "oom") > 0:
        return True
    with contextlib.suppress(OSError, ValueError):
        return int((group / "memory.failcnt").read_text()) > 0
    return False


def _count(file: Path, wanted: str) -> int:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == wanted:
                return int(value)
    return 0
