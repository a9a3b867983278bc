"""The index of one tree: build, open, update, search.

    pattern ──> literals that a match must hold ──> grams ──> candidate files ──> ripgrep on these files alone

Ripgrep decides what matches; the index only says where it need not look. Where it cannot say enough, ripgrep
searches the tree by itself. The tree must be as it was indexed, except where an overlay (or a watcher, which
feeds one) says what has changed since.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from etude.agent.index.grep.builder import Progress, plan_jobs, read_file, run_jobs, sample_ranks
from etude.agent.index.grep.manifest import (
    Contents,
    Manifest,
    SegmentEntry,
    new_name,
    open_contents,
    write_manifest,
    write_ranks,
    write_tree,
    writing,
)
from etude.agent.index.grep.overlay import Overlay, above_paths
from etude.agent.index.grep.query import GrepQuery, GrepResult
from etude.agent.index.grep.ripgrep import Ripgrep, sort_key
from etude.agent.index.grep.search import Base, Searcher
from etude.agent.index.grep.segment import Flags, Segment
from etude.agent.index.grep.tree import Statuses, Tree, scan, stat_file, walk_flags
from etude.errors import StoreError

__all__ = ["GrepIndex"]

_RACY_NS = 20_000_000
"""A file written within this time of the listing may have changed without its time showing it."""
_MOST_SMALL = 8
_SMALL_BYTES = 16 << 20
_MOST_DEAD = 0.5

Report = Callable[[Progress], None]


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
    def open(cls, into: Path, *, key: str | None = None, verify: bool = False) -> GrepIndex:
        """Opens what `build` made; `verify` reads all of it for damage, `key` must be what it was built for.

        Raises StoreError for a missing, torn or foreign index, ResourceError without ripgrep.
        """
        contents = open_contents(into)
        if key is not None and contents.manifest.key != key:
            raise StoreError(
                "is of another tree", field="index", received=contents.manifest.key, fix="build it again"
            )
        for segment in contents.segments if verify else ():
            segment.verify()
        return cls(into, contents, Ripgrep())

    @classmethod
    async def build(
        cls,
        root: Path,
        into: Path,
        *,
        key: str = "",
        hidden: bool = False,
        no_ignore: bool = False,
        processes: int = 2,
        progress: Report | None = None,
    ) -> GrepIndex:
        """Indexes the tree below `root` into the directory `into`, replacing what is there.

        The files are those that `rg --files` lists, with `hidden` and `no_ignore` as its flags. `key` names
        the content (a commit, a template's digest) for `open`. Runs in `processes` processes beside the
        caller's; cancelled or killed, it leaves the index that was there before.

        Raises ConfigError, StoreError, ResourceError without ripgrep.
        """
        ripgrep = Ripgrep()
        root = await asyncio.to_thread(root.resolve)
        with writing(into):
            scanned_ns = time.time_ns()
            tree = await scan(ripgrep, root, walk_flags(hidden, no_ignore))
            ranks = await asyncio.to_thread(sample_ranks, root, tree.files)
            manifest = Manifest(
                str(root), key, hidden, no_ignore, scanned_ns, new_name("ranks"), new_name("tree")
            )
            await asyncio.to_thread(write_ranks, into / manifest.ranks, ranks)
            await asyncio.to_thread(write_tree, into / manifest.tree, tree)
            jobs = await asyncio.to_thread(plan_jobs, root, tree.files, lambda: into / new_name("segment"))
            await run_jobs(root, jobs, ranks, processes=processes, progress=progress)
            entries = await asyncio.to_thread(_entries, [job.target for job in jobs])
            await asyncio.to_thread(write_manifest, into, replace(manifest, segments=tuple(entries)))
        return cls(into, open_contents(into), ripgrep)

    async def update(self, changed: Iterable[str] | None = None, *, progress: Report | None = None) -> int:
        """Takes in what changed on disk since the index was made; returns how many files were read anew.

        `changed`: only these paths, files or directories, can have other content (a watcher knows); otherwise
        every file's size and time are looked at, and the content's hash where those differ. Which files count
        is always asked anew. Open searches and overlays keep the old state; open overlays anew.
        """
        old = self._contents.manifest
        root = Path(old.root)
        with writing(self.directory):
            scanned_ns = time.time_ns()
            suspects = None if changed is None else {os.fsencode(path) for path in changed}
            tree, statuses = await self._look(root, suspects)
            state = await asyncio.to_thread(_compare, self._contents, root, tree.files, statuses, suspects)
            fresh, entries = await asyncio.to_thread(_merge_small, self._contents, *state)
            jobs = await asyncio.to_thread(
                plan_jobs, root, sorted(fresh, key=sort_key), lambda: self.directory / new_name("segment")
            )
            if jobs:
                await run_jobs(root, jobs, self._contents.ranks, processes=2, progress=progress)
            entries += await asyncio.to_thread(_entries, [job.target for job in jobs])
            manifest = replace(old, scanned_ns=scanned_ns, tree=new_name("tree"), segments=tuple(entries))
            await asyncio.to_thread(write_tree, self.directory / manifest.tree, tree)
            await asyncio.to_thread(write_manifest, self.directory, manifest)
        self._use(open_contents(self.directory))
        return len(state[0])

    async def stale(self) -> tuple[list[str], list[str]]:
        """Paths that are not as they were indexed (files and ignore files), and all directories that count.

        Looks at the whole tree: every file's size and time, the content where those leave doubt.
        """
        contents = self._contents
        tree, statuses = await self._look(self.root, None)
        fresh, entries = await asyncio.to_thread(_compare, contents, self.root, tree.files, statuses, None)
        stale = set(fresh)
        for entry, old, segment in zip(entries, contents.manifest.segments, contents.segments, strict=True):
            stale |= {segment.document_path(number) for number in set(entry.dead) - set(old.dead)}
        stale |= set(tree.rules) ^ set(self._searcher.base.tree.rules)
        stale |= await asyncio.to_thread(_newer_rules, self.root, tree.rules, contents.manifest.scanned_ns)
        return sorted(map(os.fsdecode, stale)), sorted(map(os.fsdecode, tree.directories))

    async def _look(self, root: Path, suspects: set[bytes] | None) -> tuple[Tree, Statuses | None]:
        """The tree as it is now, with the status of its files where any of them may have changed."""
        statuses: Statuses | None = {} if suspects is None else None
        tree = await scan(self._ripgrep, root, self._searcher.base.flags, statuses)
        return tree, statuses

    def overlay(self) -> Overlay:
        """A place for the edits of one session, searched together with this index as it is now."""
        return Overlay(self._searcher)

    def live_overlay(self) -> Overlay:
        """An overlay for a tree that is edited in place, told of changes by `touch`. `Watcher` does that."""
        return Overlay(self._searcher, live=True)

    async def search(self, query: GrepQuery) -> GrepResult:
        """The matches that ripgrep gives on the tree, by path and line.

        Raises ToolArgumentError, with ripgrep's words, for a pattern that it refuses or that takes too long;
        SandboxError if ripgrep cannot be run.
        """
        return await self._searcher.search(query)

    @property
    def key(self) -> str:
        """What the index was built for."""
        return self._contents.manifest.key

    @property
    def root(self) -> Path:
        """The tree."""
        return self._searcher.base.root

    @property
    def directories(self) -> frozenset[str]:
        """Directories of the tree that ripgrep enters, relative to the root; the root itself is empty."""
        return frozenset(map(os.fsdecode, self._searcher.base.tree.directories))

    @property
    def num_files(self) -> int:
        """Files in the index."""
        return self._searcher.base.num_files

    @property
    def size_bytes(self) -> int:
        """Of the index on disk."""
        return sum(path.stat().st_size for path in self.directory.iterdir())


def _newer_rules(root: Path, rules: Iterable[bytes], scanned_ns: int) -> set[bytes]:
    """Ignore files that may have changed since the listing."""
    statuses = ((rule, stat_file(os.fsencode(root), rule)) for rule in rules)
    return {
        rule
        for rule, status in statuses
        if status is not None and status.st_mtime_ns >= scanned_ns - _RACY_NS
    }


def _entries(paths: Iterable[Path]) -> list[SegmentEntry]:
    """What was just written, as the manifest names it."""
    segments = [Segment(path) for path in paths]
    return [
        SegmentEntry(segment.path.name, segment.num_documents, segment.text_bytes) for segment in segments
    ]


def _compare(
    contents: Contents,
    root: Path,
    files: tuple[bytes, ...],
    statuses: Statuses | None,
    suspects: set[bytes] | None,
) -> tuple[list[bytes], list[SegmentEntry]]:
    """Files to index anew, and the segments with the documents that these or removals replace marked dead.

    `statuses`: of all files, or None if only `suspects`, and what lies below them, can have changed.
    """
    base = os.fsencode(root)
    look = _lookup(base, statuses, suspects)
    listed = set(files)
    known: set[bytes] = set()
    entries: list[SegmentEntry] = []
    for entry, segment in zip(contents.manifest.segments, contents.segments, strict=True):
        same = _same(segment, base, contents.manifest.scanned_ns, listed, look)
        known |= {path for path, is_same in same if is_same}
        dead = {number for number, (_, is_same) in enumerate(same) if not is_same}
        entries.append(replace(entry, dead=tuple(sorted(dead))))
    return [path for path in files if path not in known], entries


_Lookup = Callable[[bytes], os.stat_result | Literal["trusted"] | None]
"""A file's status; None if there is none; `trusted` where it cannot have changed."""


def _lookup(root: bytes, statuses: Statuses | None, suspects: set[bytes] | None) -> _Lookup:
    def of_suspects(path: bytes) -> os.stat_result | Literal["trusted"] | None:
        assert suspects is not None
        if path not in suspects and suspects.isdisjoint(above_paths(path)):
            return "trusted"
        return stat_file(root, path)

    return of_suspects if statuses is None else statuses.get


def _same(
    segment: Segment, root: bytes, scanned_ns: int, listed: set[bytes], look: _Lookup
) -> list[tuple[bytes, bool]]:
    """Each document and whether it is alive, listed and as it was: by size and time, by its hash in doubt."""
    sizes_bytes, mtimes_ns = segment.sizes_bytes.tolist(), segment.mtimes_ns.tolist()
    safe_ns = scanned_ns - _RACY_NS

    def is_same(number: int, path: bytes) -> bool:
        status = look(path)
        if status == "trusted":
            return True
        if status is None or status.st_size != sizes_bytes[number]:
            return False
        if status.st_mtime_ns == mtimes_ns[number] and status.st_mtime_ns < safe_ns:
            return True
        found, document = read_file(root, path), segment.document(number)
        return found is not None and found[0].digest == document.digest and not document.flags & Flags.ALWAYS

    documents = enumerate(zip(segment.paths(), segment.alive.tolist(), strict=True))
    return [(path, alive and path in listed and is_same(number, path)) for number, (path, alive) in documents]


def _merge_small(
    contents: Contents, fresh: list[bytes], entries: list[SegmentEntry]
) -> tuple[list[bytes], list[SegmentEntry]]:
    """Takes apart segments that are mostly dead, and small ones if many: their files are indexed anew."""
    small = [entry for entry in entries if entry.text_bytes < _SMALL_BYTES]
    apart = set(small) if len(small) > _MOST_SMALL else set()
    apart |= {entry for entry in entries if len(entry.dead) > _MOST_DEAD * entry.num_documents}
    again = list(fresh)
    for entry, segment in zip(entries, contents.segments, strict=True):
        if entry in apart:
            dead = set(entry.dead)
            again += [path for number, path in enumerate(segment.paths()) if number not in dead]
    return again, [entry for entry in entries if entry not in apart]
