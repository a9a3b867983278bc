"""What a killed owner leaves behind, and who may clear it away.

Whatever outlives its owner (directories, control groups) carries the owner's tag: process id and start
time, which no later process shares. The next start removes what bears the tag of a dead one.
"""

from __future__ import annotations

import hashlib
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


def owner_key() -> str:
    """This process's tag in a form that tells nothing, for names that a sandbox can see."""
    return _key(owner_tag())


def live_keys() -> set[str]:
    """The keys of all processes that run."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {_key(f"{pid}-{ticks}") for pid in pids if (ticks := _start_ticks(pid)) is not None}


def _key(tag: str) -> str:
    return hashlib.blake2b(tag.encode(), key=_boot_id(), digest_size=8).hexdigest()


@cache
def _boot_id() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


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
