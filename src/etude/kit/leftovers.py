"""Scratch directories and owner tags, by which resources of a killed process are found and removed.

A scratch directory is locked by the process that works in it: if its lock is free, that process has ended.
Resources that cannot be locked (control groups, containers, marks) carry their owner's tag: process id and
start time, which no later process shares.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from functools import cache
from pathlib import Path

WORK = "work-"
"""Prefix of the names of working directories."""
_TAG = re.compile(r"(\d+)-(\d+)")


class ScratchDirectory:
    """A new locked directory in `root`, named `prefix` and a random part; a context manager for its path."""

    def __init__(self, root: Path, prefix: str = "") -> None:
        """Raises OSError."""
        self.path, self._lock = _locked_directory(root, prefix)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the directory and releases its lock. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def work_directory(root: Path) -> ScratchDirectory:
    """A scratch directory of this process below `root`, which is created with mode 0700; removes those of
    dead processes first."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    sweep(root, WORK)
    return ScratchDirectory(root, WORK)


def sweep(root: Path, prefix: str = "") -> None:
    """Removes the scratch directories of dead processes: their locks are free."""
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, or locked
            lock = _open(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _locked_directory(root: Path, prefix: str) -> tuple[Path, int | None]:
    while True:
        # Alphanumeric, as some programs make names of paths; short, as some put sockets far below.
        path = root / f"{prefix}{secrets.token_hex(6)}"
        path.mkdir(mode=0o700)
        try:
            lock = _open(path)
        except FileNotFoundError:  # swept by another process since it was made
            continue
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is swept either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_dir():
            return path, lock
        os.close(lock)  # swept since it was opened


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


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
    """A keyed hash of this process's tag, for names that a sandbox can see: it reveals nothing."""
    return _key(owner_tag())


def live_keys() -> set[str]:
    """The owner keys of all running processes."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {_key(f"{pid}-{ticks}") for pid in pids if (ticks := _start_ticks(pid)) is not None}


def _key(tag: str) -> str:
    return hashlib.blake2b(tag.encode(), key=boot_id().encode(), digest_size=8).hexdigest()


@cache
def boot_id() -> str:
    """The kernel's id of this boot of this host: process ids are unique only within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
