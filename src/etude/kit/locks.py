"""Locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Within it this process alone is in `directory`, of those that ask; on file systems without locks each
    is. The lock ends with the process, however that ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
