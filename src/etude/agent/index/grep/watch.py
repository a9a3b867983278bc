"""Keeps searches fresh while a tree is edited in place.

    kernel ──> inotify events ──> changed paths ──> live overlay ──> search reads them from disk

The kernel queues an event before the edit that caused it returns, and a search first takes in what is queued:
it sees every edit that ended before it began, without a look at the tree. Should events be lost, sizes and
times of the whole tree are compared once (`rescans` counts that). Not seen: ignore files above the root and
the user's own git excludes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from etude.agent.index.grep.index import GrepIndex
from etude.agent.index.grep.inotify import Inotify
from etude.agent.index.grep.overlay import Overlay
from etude.agent.index.grep.query import GrepQuery, GrepResult

__all__ = ["Watcher"]

_MOST_ROUNDS = 20
_EXCLUDES = b".git/info"


class Watcher:
    """Watches one index's tree. Make it with `start`; belongs to the event loop in which it was made."""

    def __init__(self, index: GrepIndex, inotify: Inotify) -> None:
        """Use `start`."""
        self._index = index
        self._inotify = inotify
        self._overlay: Overlay = index.live_overlay()
        self._meanwhile: set[str] | None = None
        self._lock = asyncio.Lock()
        self._folding = asyncio.Lock()
        self.rescans = 0
        """How often lost events made a comparison of the whole tree necessary."""

    @classmethod
    async def start(cls, index: GrepIndex) -> Watcher:
        """Begins to watch, then compares the tree once with the index for edits made before.

        Raises ConfigError where there is no inotify, ResourceError where the system allows too few watches.
        """
        inotify = Inotify(os.fsencode(index.root))
        watcher = cls(index, inotify)
        try:
            await asyncio.to_thread(watcher._watch_all)
            await watcher._compare()
        except BaseException:
            watcher.close()
            raise
        asyncio.get_running_loop().add_reader(inotify.descriptor, watcher._take)
        return watcher

    async def search(self, query: GrepQuery) -> GrepResult:
        """As `GrepIndex.search`, on the tree as it is now."""
        async with self._lock:
            await self._refresh()
            overlay = self._overlay
        return await overlay.search(query)

    async def fold(self) -> int:
        """Takes the changes into the index itself; returns how many files were read. Searches go on
        meanwhile; another call waits for its turn."""
        async with self._folding:
            return await self._fold()

    async def _fold(self) -> int:
        async with self._lock:
            await self._refresh()
            self._meanwhile = set()
        try:
            count = await self._index.update(self._overlay.changed)
            async with self._lock:
                await self._refresh()
                old, self._overlay = self._overlay, self._index.live_overlay()
                for path in sorted(self._meanwhile):
                    self._overlay.touch(path)
        finally:
            self._meanwhile = None
        old.close()
        return count

    def close(self) -> None:
        """Ends watching."""
        if self._inotify.descriptor >= 0:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its readers with it
                asyncio.get_running_loop().remove_reader(self._inotify.descriptor)
        self._inotify.close()
        self._overlay.close()

    def _watch_all(self) -> None:
        for directory in self._index.directories:
            self._inotify.watch(os.fsencode(directory))
        self._inotify.watch(_EXCLUDES)

    async def _refresh(self) -> None:
        """Until nothing is queued and nothing is left to find out."""
        for _ in range(_MOST_ROUNDS):
            changed = self._take()
            await self._overlay.settle(self._watch)
            if self._inotify.overflowed:
                await self._compare()
            elif not changed:
                return

    def _take(self) -> bool:
        """Tells the overlay what is queued; whether there was anything."""
        paths = dict.fromkeys(event.path for event in self._inotify.drain())
        for path in paths:
            name = os.fsdecode(path)
            if self._meanwhile is not None:
                self._meanwhile.add(name)
            if name.startswith(".git/info/") and name != ".git/info/exclude":
                continue
            try:
                self._overlay.touch(name)
            except OSError:
                self._inotify.overflowed = True  # no room in the temporary directory: this event is lost
                raise
        return bool(paths)

    def _watch(self, directory: bytes) -> None:
        self._inotify.watch(directory)

    async def _compare(self) -> None:
        """Compares the whole tree with the index: at the start, and when the kernel lost events."""
        if self._inotify.overflowed:
            self.rescans += 1
            self._inotify.overflowed = False
        stale, directories = await self._index.stale()
        for directory in directories:
            self._watch(os.fsencode(directory))
        for path in stale:
            if self._meanwhile is not None:
                self._meanwhile.add(path)
            self._overlay.touch(path)
