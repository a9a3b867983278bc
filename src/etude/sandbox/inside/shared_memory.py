"""Memory that outlives the processes that filled it: System V objects, and POSIX ones in /dev/shm.

A control group counts it, and nobody is left whom the kernel could end for it but the sandbox's server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

POSIX_OBJECTS = "/dev/shm"
_REMOVE = 0
"""IPC_RMID."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_KINDS = {
    "shm": lambda number: _LIBC.shmctl(number, _REMOVE, None),
    "msg": lambda number: _LIBC.msgctl(number, _REMOVE, None),
    "sem": lambda number: _LIBC.semctl(number, 0, _REMOVE),
}


def remove_shared_memory() -> None:
    """Removes all of it that this process may remove. For servers whose IPC namespace is their own."""
    for kind, remove in _KINDS.items():
        for number in _numbers(kind):
            remove(number)
    with contextlib.suppress(OSError), os.scandir(POSIX_OBJECTS) as entries:
        for entry in list(entries):
            # What lies deeper is no shared memory, but files like all others.
            if not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def _numbers(kind: str) -> list[int]:
    """Of all objects of a kind; none where the kernel lists none."""
    try:
        with open(f"/proc/sysvipc/{kind}", "rb") as file:
            return [int(row.split()[1]) for row in file.read().splitlines()[1:]]
    except (OSError, ValueError, IndexError):
        return []
