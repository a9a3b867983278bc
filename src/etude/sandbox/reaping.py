"""What a killed owner leaves behind, and who may clear it away.

Whatever outlives its owner (directories, control groups) carries the owner's tag: process id and start
time, which no later process shares. The next start removes what bears the tag of a dead one.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import cache
from pathlib import Path

_TAG = re.compile(r"(\d+)-(\d+)")


def _start_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@cache
def _tag(pid: int) -> str:
    return f"{pid}-{_start_ticks(pid)}"


def owner_tag() -> str:
    """This process's tag."""
    return _tag(os.getpid())


def is_owner_alive(name: str) -> bool:
    """Whether the process whose tag begins `name` still runs. A name without a tag has no owner."""
    match = _TAG.match(name)
    if match is None:
        return False
    return _start_ticks(int(match[1])) == int(match[2])


class WorkDirectory:
    """A directory of this process below `root`, for sockets, disks and the like of running sandboxes."""

    def __init__(self, root: Path) -> None:
        """Makes it, and removes those of dead owners."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for entry in root.iterdir():
            if _TAG.match(entry.name) and not is_owner_alive(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        number = 0
        while True:
            self.path = root / f"{owner_tag()}-{number}"
            try:
                self.path.mkdir(mode=0o700)
                return
            except FileExistsError:
                number += 1

    def close(self) -> None:
        """Removes it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
