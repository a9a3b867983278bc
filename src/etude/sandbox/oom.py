"""What a control group says of processes that the kernel ended for want of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path


def num_oom_kills(group: Path) -> int:
    """Processes of a group that the kernel has ended because the group's memory was used up; 0 if it is gone.

    Version 2 counts in `memory.events`, version 1 in `memory.oom_control`.
    """
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in (group / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0
