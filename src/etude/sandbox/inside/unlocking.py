"""Reads what the agent has locked away from itself: rights that its owner may give back, for a moment.

The agent may take every right from its own files (`chmod 000 a.py`, `chmod 0 .`). Where the server has no
capabilities it is no more than their owner, and would not see them either: one such file would hide all
changes. An owner may always change modes, so the server takes the right that it lacks and puts everything
back as it was: the agent's next `ls -l` shows what it did.

What belongs to somebody else cannot be unlocked, nor could the agent have read or changed it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from types import TracebackType

_READ, _ENTER = stat.S_IRUSR, stat.S_IRUSR | stat.S_IXUSR


class Unlocked:
    """A context in which directories that were entered stay open to us; at its end all are as they were."""

    def __init__(self) -> None:
        self._changed: list[tuple[str, int]] = []

    def __enter__(self) -> Unlocked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The innermost first: once a directory is locked nothing below it can be reached.
        while self._changed:
            path, mode = self._changed.pop()
            try:
                os.chmod(path, mode)
            except OSError:
                # The agent removed or moved it meanwhile: there is nothing left to be put back.
                continue

    def enter(self, folder: str) -> bool:
        """Makes sure that a directory can be listed and gone through; False where that is impossible."""
        if os.access(folder, os.R_OK | os.X_OK):
            return True
        try:
            mode = stat.S_IMODE(os.lstat(folder).st_mode)
            self._changed.append((folder, mode))
            os.chmod(folder, mode | _ENTER)
        except OSError:
            return False
        return True


def open_unlocked(name: str, folder: int, opening: Callable[[], int]) -> int:
    """What `opening` opens: the regular file `name` of a directory, unlocked while it does so if it must be.

    Raises OSError, PermissionError for a file of somebody else's.
    """
    try:
        return opening()
    except PermissionError:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise
        mode = stat.S_IMODE(status.st_mode)
        try:
            os.chmod(name, mode | _READ, dir_fd=folder)
            return opening()
        finally:
            # As above: whoever removed it meanwhile must not have us lose what was opened.
            with contextlib.suppress(OSError):
                os.chmod(name, mode, dir_fd=folder)
