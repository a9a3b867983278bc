"""The index of one tree: build, open, update, search.

    pattern ──> literals that a match must hold ──> grams ──> candidate files ──> ripgrep on these files alone

Ripgrep decides what matches; the index only says where it need not look. Where it cannot say enough, ripgrep
searches the tree by itself. The tree must be as it was indexed, except where an overlay (or a watcher, which
feeds one) says what has changed since.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from etude.agent.index.grep.builder import Progress, read_file, sample_ranks, write_segments
from etude.agent.index.grep.manifest import (
    Contents,
    Manifest,
    new_name,
    open_contents,
    write_manifest,
    writing,
)
from etude.agent.index.grep.overlay import Overlay
from etude.agent.index.grep.query import GrepQuery, GrepResult
from etude.agent.index.grep.ripgrep import Ripgrep, sort_key
from etude.agent.index.grep.search import Base, Searcher
from etude.agent.index.grep.segment import Flags, Segment
from etude.agent.index.walk import Listing, walk
from etude.errors import StoreError

__all__ = ["GrepIndex"]

_RACY_NS = 20_000_000
"""A file written within this time of the listing may have changed without its time showing it."""
_MOST_SMALL = 8
_SMALL_BYTES = 16 << 20
_MOST_DEAD = 0.5

Report = Callable[[Progress], None]
Result = TypeVar("Result")


class GrepIndex:
    """An opened index. Searches may run side by side; one process at a time may change it."""

    def __init__(self, into: Path, contents: Contents, ripgrep: Ripgrep) -> None:
        """Use `open` or `build`."""
        self.directory = into
        self._ripgrep = ripgrep
        self._use(contents)

    def _use(self, contents: Contents) -> None:
        self._contents = contents
        self._searcher = Searcher(Base(contents), self._ripgrep)

    @classmethod
    def open(cls, into: Path, *, key: str | None = None) -> GrepIndex:
        """Opens what `build` made; `key` must be what it was built for.

        Raises StoreError for a missing, torn or foreign index, ResourceError without ripgrep.
        """
        contents = open_contents(into)
        if key is not None and contents.manifest.key != key:
            raise StoreError(
                "is of another tree", field="index", received=contents.manifest.key, fix="build it again"
            )
        return cls(into, contents, Ripgrep())

    @classmethod
    async def build(
        cls, root: Path, into: Path, *, key: str = "", progress: Report | None = None
    ) -> GrepIndex:
        """Indexes the files below `root` that are not hidden into the directory `into`, replacing what is
        there.

        `key` names the content (a commit, a template's digest) for `open`. Works in a thread; cancelled or
        killed, it leaves the index that was there before.

        Raises ConfigError, StoreError, ResourceError without ripgrep.
        """
        ripgrep = Ripgrep()

        def build(report: Report) -> Contents:
            with writing(into):
                scanned_ns, listing = time.time_ns(), walk(root.resolve())
                return _write(root.resolve(), into, key, scanned_ns, listing, list(listing.files), {}, report)

        return cls(into, await _in_thread(build, progress), ripgrep)

    async def update(self, *, progress: Report | None = None) -> int:
        """Takes in what changed on disk since the index was made; returns how many files were read anew.

        Every file's size and time are looked at, and the content's hash where those differ. Open overlays
        keep the old state; open overlays anew.
        """
        num_stale = 0

        def update(report: Report) -> Contents:
            nonlocal num_stale
            with writing(self.directory):
                scanned_ns, listing = time.time_ns(), walk(self.root)
                dead, fresh = _compare(self._contents, self.root, listing)
                num_stale = len(fresh)
                kept, again = _without_small(self._contents, dead)
                fresh += again
                key = self._contents.manifest.key
                return _write(self.root, self.directory, key, scanned_ns, listing, fresh, kept, report)

        self._use(await _in_thread(update, progress))
        return num_stale

    async def stale(self) -> list[str]:
        """Paths of files that are not as they were indexed. Looks at every file's size and time, and at the
        content where those leave doubt."""
        contents = self._contents
        dead, fresh = await asyncio.to_thread(lambda: _compare(contents, self.root, walk(self.root)))
        gone = {
            segment.paths[number]
            for segment in contents.segments
            for number in dead[segment.path.name]
            if segment.alive[number]
        }
        return sorted(map(os.fsdecode, gone | set(fresh)))

    def overlay(self, *, live: bool = False) -> Overlay:
        """A place for the edits of one session, searched together with this index as it is now.

        `live`: the tree on disk itself is edited, and `Overlay.touch` says where.
        """
        return Overlay(self.root, self._searcher.search, live=live)

    async def search(self, query: GrepQuery) -> GrepResult:
        """The matches that ripgrep gives on the tree, by path and line.

        Raises ToolArgumentError, with ripgrep's words, for a pattern that it refuses or that takes too long;
        SandboxError if ripgrep cannot be run.
        """
        return await self._searcher.search(query)

    @property
    def root(self) -> Path:
        """The tree."""
        return self._searcher.base.root

    @property
    def num_files(self) -> int:
        """Files in the index."""
        return self._searcher.base.num_files

    @property
    def size_bytes(self) -> int:
        """Of the index on disk."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())


async def _in_thread(work: Callable[[Report], Result], progress: Report | None) -> Result:
    """Runs `work`, whose reports reach `progress` in the event loop; a cancelled caller waits until the next
    report has ended it."""
    loop, stop = asyncio.get_running_loop(), threading.Event()

    def report(now: Progress) -> None:
        if stop.is_set():
            raise InterruptedError
        if progress is not None:
            loop.call_soon_threadsafe(progress, now)

    task = asyncio.ensure_future(asyncio.to_thread(work, report))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _write(
    root: Path,
    into: Path,
    key: str,
    scanned_ns: int,
    listing: Listing,
    fresh: list[bytes],
    kept: dict[str, list[int]],
    report: Report,
) -> Contents:
    """Adds segments of the `fresh` files to those that are kept, and opens the whole."""
    fresh.sort(key=sort_key)
    files = [(path, listing.files[path].st_size) for path in fresh]
    ranks = sample_ranks(root, fresh)
    written = write_segments(root, files, lambda: into / new_name(), ranks, report)
    segments = kept | {path.name: list[int]() for path in written}
    directories, hidden = (sorted(map(os.fsdecode, paths)) for paths in (listing.directories, listing.hidden))
    write_manifest(into, Manifest(str(root), key, scanned_ns, directories, hidden, segments))
    return open_contents(into)


def _compare(contents: Contents, root: Path, listing: Listing) -> tuple[dict[str, list[int]], list[bytes]]:
    """By segment the documents that no longer count; and the files to index anew."""
    known: set[bytes] = set()
    dead: dict[str, list[int]] = {}
    for segment in contents.segments:
        same = _same(segment, root, contents.manifest.scanned_ns - _RACY_NS, listing)
        known |= {path for path, is_same in zip(segment.paths, same, strict=True) if is_same}
        dead[segment.path.name] = [number for number, is_same in enumerate(same) if not is_same]
    return dead, [path for path in listing.files if path not in known]


def _same(segment: Segment, root: Path, safe_ns: int, listing: Listing) -> list[bool]:
    """Whether each document counts and is as it was: by size and time, by its content's hash in doubt."""
    same: list[bool] = []
    for document, alive in zip(segment.documents(), segment.alive.tolist(), strict=True):
        status = listing.files.get(document.path) if alive else None
        if status is None or status.st_size != document.size_bytes:
            same.append(False)
        elif status.st_mtime_ns == document.mtime_ns and status.st_mtime_ns < safe_ns:
            same.append(True)
        else:
            found = read_file(root, document.path)
            unread = document.flags & Flags.ALWAYS
            same.append(found is not None and found[0].digest == document.digest and not unread)
    return same


def _without_small(
    contents: Contents, dead: dict[str, list[int]]
) -> tuple[dict[str, list[int]], list[bytes]]:
    """Takes apart segments that are mostly dead, and small ones if many: what is kept, and files to index
    anew with others."""
    small = {segment.path.name for segment in contents.segments if segment.text_bytes < _SMALL_BYTES}
    kept: dict[str, list[int]] = {}
    again: list[bytes] = []
    for segment in contents.segments:
        name, paths = segment.path.name, segment.paths
        mostly_dead = len(dead[name]) > _MOST_DEAD * len(paths)
        if mostly_dead or (name in small and len(small) > _MOST_SMALL):
            gone = set(dead[name])
            again += [path for number, path in enumerate(paths) if number not in gone]
        else:
            kept[name] = dead[name]
    return kept, again
