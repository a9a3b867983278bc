"""Marks beside snapshots that stand between two steps of a move or a fork: they go with a process.

    .owned-<pid>-<start>-<id>     snapshot <id> is that process's, and goes with it
    .transit-<pid>-<start>-<id>   the same for one that came from elsewhere, which besides has `TRANSIT_S`
                                  to become a sandbox

A mark is made before its snapshot appears and removed after it has gone, so that a crash leaves no temporary
snapshot without one. Whoever next writes to the store, or starts on its state directory, sweeps.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path
from typing import Literal

from etude.kit.leftovers import is_owner_alive, owner_tag

TRANSIT_S = 300.0
"""How long a temporary snapshot from elsewhere stays: whoever sent it makes a sandbox of it at once, or is
dead."""
Kind = Literal["owned", "transit"]
_MARK = re.compile(r"\.(owned|transit)-(\d+-\d+)-(.+)", re.DOTALL)


class Marks:
    """The temporary snapshots below one directory. Several processes may share it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, kind: Kind, snapshot: str) -> None:
        """Says that a snapshot, which is about to appear, is temporary. Raises OSError."""
        (self._root / f".{kind}-{owner_tag()}-{snapshot}").touch(mode=0o600)

    def snapshots(self, kind: Kind | None = None) -> set[str]:
        """The snapshots that are temporary, of one kind or of both."""
        return {match[3] for _, match in self._found() if kind in (None, match[1])}

    def remove(self, snapshot: str) -> None:
        """A snapshot has gone. Idempotent."""
        for mark, match in self._found():
            if match[3] == snapshot:
                mark.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes the snapshots of dead processes, and those that nobody fetched in time."""
        for mark, match in self._found():
            if not is_owner_alive(match[2]) or (match[1] == "transit" and _is_overdue(mark)):
                shutil.rmtree(self._root / match[3], ignore_errors=True)
                with contextlib.suppress(PermissionError):
                    # Another user's, who shares the directory: theirs to clear.
                    mark.unlink(missing_ok=True)

    def _found(self) -> list[tuple[Path, re.Match[str]]]:
        marks = [*self._root.glob(".owned-*"), *self._root.glob(".transit-*")]
        return [(mark, match) for mark in marks if (match := _MARK.fullmatch(mark.name)) is not None]


def _is_overdue(mark: Path) -> bool:
    try:
        return time.time() - mark.stat().st_mtime > TRANSIT_S
    except FileNotFoundError:
        return False
