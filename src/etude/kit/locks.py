"""Advisory locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds an exclusive advisory lock on `directory` within the block; no lock on file systems without them.
    The kernel releases it when the process ends, however that happens. Without `wait` raises BlockingIOError
    if another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
