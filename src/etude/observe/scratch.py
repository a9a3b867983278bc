"""Temporary directories, each locked by the process that works in it.

Whose lock is free was left by a process that is gone, and may be removed by anybody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch_directory(root: Path, prefix: str = "") -> Iterator[Path]:
    """A new directory in `root`, whose name begins with `prefix`; goes with the block, or with this process
    when somebody sweeps. Raises OSError."""
    path, lock = _locked_directory(root, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(root: Path, prefix: str = "") -> None:
    """Removes what dead processes left of `scratch_directory`: their locks are free."""
    for path in root.glob(f"{prefix}*"):
        try:
            lock = _open(path)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _locked_directory(root: Path, prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            lock = _open(path)
        except FileNotFoundError:  # swept by another process since mkdtemp
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_dir():
            return path, lock
        os.close(lock)  # swept since it was opened


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
