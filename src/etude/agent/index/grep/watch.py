"""Keeps searches fresh while a tree is edited in place.

    kernel ──> watchfiles ──> changed paths ──> live overlay ──> search reads them from disk

A search first writes a mark into a directory that is watched together with the tree, and waits until it is
reported: by then every edit that ended before the search began has been reported too. Where no report comes
in time, or the package is missing, sizes and times of the whole tree are compared (`rescans` counts that).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from etude.agent.index.grep.index import GrepIndex
from etude.agent.index.grep.query import GrepQuery, GrepResult
from etude.errors import ResourceError

try:
    import watchfiles
except ImportError:  # the extra `agent` is not installed
    watchfiles = None

__all__ = ["Watcher"]

_MARK_S = 5.0
_STEP_MS = 1
_WAIT_MS = 50


class Watcher:
    """Watches one index's tree. Make it with `start`; belongs to the event loop in which it was made."""

    def __init__(self, index: GrepIndex) -> None:
        """Use `start`."""
        self._index = index
        self._overlay = index.overlay(live=True)
        self._marks = tempfile.TemporaryDirectory(prefix="etude-watch-")
        self._changes: Generator[set[tuple[Any, str]]] | None = None
        self._lock = asyncio.Lock()
        self.rescans = 0
        """How often the whole tree had to be compared after the start."""

    @classmethod
    async def start(cls, index: GrepIndex) -> Watcher:
        """Begins to watch, then compares the tree once with the index for edits made before.

        Raises ResourceError where the system allows too few watches.
        """
        watcher = cls(index)
        try:
            await asyncio.to_thread(watcher._begin)
            for path in await index.stale():
                watcher._overlay.touch(path)
        except BaseException:
            watcher.close()
            raise
        return watcher

    async def search(self, query: GrepQuery) -> GrepResult:
        """As `GrepIndex.search`, on the tree as it is now."""
        async with self._lock:
            # Shielded: a second thread must not enter the generator while this one is in it.
            reading = asyncio.ensure_future(asyncio.to_thread(self._read))
            try:
                changed = await asyncio.shield(reading)
            except asyncio.CancelledError:
                await asyncio.wait([reading])
                raise
            if changed is None:
                self.rescans += 1
                changed = set(await self._index.stale())
                self._overlay.close()
                self._overlay = self._index.overlay(live=True)
            for path in sorted(changed):
                self._overlay.touch(path)
            overlay = self._overlay
        return await overlay.search(query)

    def close(self) -> None:
        """Ends watching."""
        if self._changes is not None:
            self._changes.close()
        self._overlay.close()
        self._marks.cleanup()

    def _begin(self) -> None:
        if watchfiles is None:
            return
        changes = watchfiles.watch(
            self._index.root,
            self._marks.name,
            watch_filter=None,
            debounce=_STEP_MS,
            step=_STEP_MS,
            rust_timeout=_WAIT_MS,
            yield_on_timeout=True,
            raise_interrupt=False,
            ignore_permission_denied=True,
        )
        try:
            next(changes)
        except (OSError, RuntimeError) as error:
            raise ResourceError(
                f"the tree cannot be watched: {error}",
                field="watch",
                received=str(self._index.root),
                fix="raise sysctl fs.inotify.max_user_watches",
            ) from error
        self._changes = changes

    def _read(self) -> set[str] | None:
        """Paths that were reported up to now; None if reports may be missing."""
        if self._changes is None:
            return None
        mark = Path(self._marks.name, str(time.monotonic_ns()))
        mark.touch()
        root, seen = f"{self._index.root}/", set[str]()
        ends_s = time.monotonic() + _MARK_S
        while str(mark) not in seen:
            if time.monotonic() > ends_s:
                return None
            seen |= {name for _, name in next(self._changes)}
        mark.unlink()
        inside = (name.removeprefix(root) for name in seen if name.startswith(root))
        return {path for path in inside if "/." not in f"/{path.rpartition('/')[0]}"}
