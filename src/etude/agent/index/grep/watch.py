"""Keeps searches fresh while a tree is edited in place.

    kernel ──> watchfiles ──> changed paths ──> live overlay ──> search reads them from disk

A search first writes a mark into a directory that is watched together with the tree, and waits until it is
reported: by then every edit that ended before the search began has been reported too. Where no report comes
in time, or the package is missing, sizes and times of the whole tree are compared (`rescans` counts that).
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from etude.agent.index.grep.index import GrepIndex
from etude.agent.index.grep.query import GrepQuery, GrepResult
from etude.errors import ResourceError
from etude.kit.tasks import to_the_end

__all__ = ["Watcher"]

watchfiles: Any = importlib.import_module("watchfiles") if importlib.util.find_spec("watchfiles") else None
"""None where the extra `agent` is not installed."""

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
        self._pending: set[str] = set()
        """Paths that changed, of which the overlay does not know yet."""
        self._lost = False
        """There may be more of them than were reported."""
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
            await to_the_end(asyncio.to_thread(watcher._begin))
            for path in await index.stale():
                watcher._overlay.touch(path)
        except BaseException:
            watcher.close()
            raise
        return watcher

    async def search(self, query: GrepQuery) -> GrepResult:
        """As `GrepIndex.search`, on the tree as it is now."""
        async with self._lock:
            # To the end: no second thread must enter the generator while this one is in it.
            await to_the_end(asyncio.to_thread(self._read))
            if self._lost:
                self._pending = set(await self._index.stale())
                self._overlay.close()
                self._overlay = self._index.overlay(live=True)
                self._lost = False
                self.rescans += 1
            for path in sorted(self._pending):
                self._overlay.touch(path)
                self._pending.discard(path)
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

    def _read(self) -> None:
        """Takes what was reported up to now."""
        if self._changes is None:
            self._lost = True
            return
        mark = Path(self._marks.name, str(time.monotonic_ns()))
        mark.touch()
        root, seen = f"{self._index.root}/", set[str]()
        ends_s = time.monotonic() + _MARK_S
        while str(mark) not in seen and not self._lost:
            self._lost = time.monotonic() > ends_s
            seen |= {name for _, name in next(self._changes)}
        mark.unlink()
        inside = (name.removeprefix(root) for name in seen if name.startswith(root))
        self._pending |= {path for path in inside if "/." not in f"/{path.rpartition('/')[0]}"}
