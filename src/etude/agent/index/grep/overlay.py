"""Edits on top of a shared index: files written and removed since it was made.

Changed files are mirrored at their paths in a temporary directory that ripgrep searches together with the
index's candidates; the index's own files at changed paths are masked. Many overlays, one per session, share
one index.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.agent.index.grep.query import GrepQuery, GrepResult
from etude.errors import ConfigError
from etude.kit.durable import whole_file


class Overlay:
    """The edits of one session. Not thread-safe. Must be closed: it keeps temporary files."""

    def __init__(self, search: Callable[[GrepQuery, Overlay], Awaitable[GrepResult]]) -> None:
        """Use `GrepIndex.overlay`."""
        self._search = search
        self._mirrored: set[bytes] = set()
        self._masked: set[bytes] = set()
        """Paths at and below which the index's files are masked."""
        self._new_directories: set[bytes] = set()
        """Paths that are directories now; index files at these paths are masked."""
        self._mirror: Path | None = None
        self._searches = 0
        self._closed = False

    @property
    def mirror(self) -> Path | None:
        """The directory with the changed files at their paths; None if there are none."""
        return self._mirror if self._mirrored else None

    def masks(self, path: bytes) -> bool:
        """Whether the index's file at `path` is masked: replaced or removed."""
        masked = self._masked
        return path in masked or path in self._new_directories or not masked.isdisjoint(_above(path))

    def holds(self, path: bytes) -> bool:
        """Whether the file at `path` is in the mirror as a changed file."""
        return path in self._mirrored

    def write(self, path: str, content: bytes) -> None:
        """Records the file's new content. Raises ConfigError for a path outside the root."""
        name = _checked(path)
        target = self._place(name)
        with whole_file(target, sync=False) as file:
            file.write(content)
        self._mirrored.add(name)

    def remove(self, path: str) -> None:
        """Records that the file or directory at `path` was removed."""
        self._clear(_checked(path))

    async def search(self, query: GrepQuery) -> GrepResult:
        """As `GrepIndex.search`, on the tree with these edits."""
        self._searches += 1
        try:
            return await self._search(query, self)
        finally:
            self._searches -= 1
            if self._closed:
                self.close()

    def close(self) -> None:
        """Removes the mirror once the last search has ended; the overlay is unusable afterwards."""
        self._closed = True
        if self._searches:
            return
        self._mirrored.clear()
        if self._mirror is not None:
            shutil.rmtree(self._mirror, ignore_errors=True)
            self._mirror = None

    def __enter__(self) -> Overlay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, path: bytes) -> Path:
        """Prepares `path` in the mirror for a file: clears it and makes its parent directories."""
        self._clear(path, keep_file=True)
        if self._mirror is None:
            self._mirror = Path(tempfile.mkdtemp(prefix="etude-grep-"))
        for above in reversed(_above(path)):
            self._new_directories.add(above)
            if above in self._mirrored:
                self._mirrored.discard(above)
                (self._mirror / os.fsdecode(above)).unlink()
        target = self._mirror / os.fsdecode(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _clear(self, path: bytes, keep_file: bool = False) -> None:
        """Masks and removes all at and below `path`. `keep_file`: a file there is about to be replaced."""
        self._masked.add(path)
        if self._mirror is None:
            return
        target = self._mirror / os.fsdecode(path)
        if path in self._mirrored:
            if not keep_file:
                self._mirrored.discard(path)
                target.unlink()
        elif target.is_dir():
            self._mirrored = {changed for changed in self._mirrored if not changed.startswith(path + b"/")}
            shutil.rmtree(target)


def _checked(path: str) -> bytes:
    name = os.fsencode(path)
    parts = name.split(b"/")
    if b".." in parts or b"" in parts or b"." in parts or b"\0" in name:
        raise ConfigError(
            "is not a path below the root",
            field="path",
            received=path,
            fix="use names joined by single slashes",
        )
    return name


def _above(path: bytes) -> list[bytes]:
    """The parent directories of `path`, innermost first."""
    found: list[bytes] = []
    while path := path.rpartition(b"/")[0]:
        found.append(path)
    return found
