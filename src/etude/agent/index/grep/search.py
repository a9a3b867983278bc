"""One search over an immutable base and, where there is one, an overlay of changes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.grep.literals import Plan, plan
from etude.agent.index.grep.manifest import Contents
from etude.agent.index.grep.overlay import Overlay
from etude.agent.index.grep.query import FileMatches, GrepQuery, GrepResult
from etude.agent.index.grep.ripgrep import Ripgrep, parse_matches, sort_key
from etude.agent.index.grep.segment import Flags, Segment
from etude.kit.tasks import off_loop, run_together

HAND_OVER_SHARE = 0.25
"""With more of the tree as candidates, ripgrep's own walk is as fast."""
_ARGUMENT_BYTES = 1 << 20
_FIRST_BATCH = 64
_BATCH_GROWTH = 8
_MOST_BATCHED = 5000
"""With a limit, number of files tried in order of path before the whole tree is searched."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Matches of one or several runs, by file."""

    files: list[FileMatches]
    cut: bool


class Searcher:
    """Answers queries over one index. Keeps no state between queries; safe to share."""

    def __init__(self, contents: Contents, ripgrep: Ripgrep) -> None:
        self.ripgrep = ripgrep
        self.segments = contents.segments
        self.root = Path(contents.manifest.root)
        self.directories = frozenset(map(os.fsencode, contents.manifest.directories))
        self.num_files = sum(len(segment.paths) for segment in contents.segments)

    @functools.cached_property
    def files(self) -> list[bytes]:
        """All files in order of path. The first call takes a moment on a large tree."""
        return sorted(itertools.chain.from_iterable(part.paths for part in self.segments), key=sort_key)

    @functools.cached_property
    def with_nul(self) -> frozenset[bytes]:
        """Files that hold a NUL."""
        found = (self._paths(segment, np.flatnonzero(segment.flags & Flags.NUL)) for segment in self.segments)
        return frozenset(itertools.chain.from_iterable(found))

    def _candidates(self, lookup: Plan, most: float) -> list[bytes] | None:
        """Files that may match, unordered; None if there are more than `most`."""
        found = [segment.candidates(lookup) for segment in self.segments]
        if sum(map(len, found)) > most:
            return None
        return list(itertools.chain.from_iterable(map(self._paths, self.segments, found)))

    @staticmethod
    def _paths(segment: Segment, numbers: NDArray[np.intp]) -> list[bytes]:
        return [segment.paths[number] for number in numbers.tolist()]

    async def search(self, query: GrepQuery, changes: Overlay | None = None) -> GrepResult:
        """The matches that ripgrep gives on the changed tree. Raises ToolArgumentError for a bad pattern."""
        path = os.fsencode(query.path).strip(b"/").removeprefix(b"./")
        path = b"" if path == b"." else path
        if path and path not in self.directories:
            return await self._direct(query, path, changes)
        keeps = functools.partial(_keeps, query, path, changes)
        most = self.num_files * HAND_OVER_SHARE
        candidates = self._candidates(plan(query), most)
        if candidates is None:
            if query.limit is not None:
                files = await asyncio.to_thread(lambda: self.files)
                return await self._in_order(query, path, keeps, files, changes)
            return await self._direct(query, path, changes)
        if query.limit is not None:
            candidates.sort(key=sort_key)
            return await self._in_order(query, path, keeps, candidates, changes)
        kept = [candidate for candidate in candidates if keeps(candidate)]
        base, mirror = await run_together([self._explicit(query, kept), self._mirrored(query, path, changes)])
        return _result(query, [base, mirror], len(kept), True)

    async def _in_order(
        self,
        query: GrepQuery,
        path: bytes,
        keeps: Callable[[bytes], bool],
        files: Sequence[bytes],
        changes: Overlay | None,
    ) -> GrepResult:
        """Searches in order of path until the limit is reached, in batches that grow."""
        assert query.limit is not None
        runs = [await self._mirrored(query, path, changes)]
        size, tried = _FIRST_BATCH, 0
        remaining = filter(keeps, files)
        while batch := list(itertools.islice(remaining, size)):
            if tried + len(batch) > _MOST_BATCHED and len(files) > self.num_files * HAND_OVER_SHARE:
                return await self._direct(query, path, changes)
            runs.append(await self._explicit(query, batch))
            tried += len(batch)
            last = sort_key(batch[-1])
            upto = [file for run in runs for file in run.files if sort_key(file.path) <= last]
            if sum(map(len, upto)) > query.limit or any(run.cut for run in runs):
                return _result(query, runs, tried, True)
            size *= _BATCH_GROWTH
        return _result(query, runs, tried, True)

    async def _explicit(self, query: GrepQuery, paths: list[bytes]) -> _Found:
        """Searches these files of the base, and no others."""
        if not paths:
            await self.ripgrep.check_pattern(query.pattern_flags(), self.root)
            return _Found([], False)
        plain = [path for path in paths if path not in self.with_nul]
        runs = [await self._run(query, part, self.root) for part in _parts_by_size(plain)]
        odd = [path for path in paths if path in self.with_nul]
        if odd:
            runs.append(await self._as_found(query, odd))
        return _joined(runs)

    async def _as_found(self, query: GrepQuery, paths: list[bytes]) -> _Found:
        """Searches files with NULs the way ripgrep does when it finds them in a directory: up to the NUL.

        A file named on the command line it would read beyond. So they are linked into a temporary directory,
        and that is searched.
        """
        with tempfile.TemporaryDirectory(prefix="etude-grep-") as directory:
            links = Path(directory)
            for number, path in enumerate(paths):
                (links / str(number)).symlink_to(self.root / os.fsdecode(path))
            found = await self._run(query, [b""], links, "--hidden", "--follow")
        named = [replace(file, path=paths[int(file.path)]) for file in found.files]
        return _Found(named, found.cut)

    async def _mirrored(self, query: GrepQuery, path: bytes, changes: Overlay | None) -> _Found:
        """Searches the changed files in the overlay's mirror."""
        if changes is None or changes.mirror is None:
            return _Found([], False)
        if path and not (changes.mirror / os.fsdecode(path)).exists():
            return _Found([], False)
        found = await self._run(query, [path], changes.mirror, "--follow")
        kept = [file for file in found.files if changes.holds(file.path) and query.includes(file.path)]
        return _Found(kept, found.cut)

    async def _direct(self, query: GrepQuery, path: bytes, changes: Overlay | None) -> GrepResult:
        """Searches the whole tree with ripgrep, without the index."""
        base, mirror = await run_together(
            [self._run(query, [path], self.root), self._mirrored(query, path, changes)]
        )
        kept = [file for file in base.files if _keeps(query, path, changes, file.path)]
        return _result(query, [_Found(kept, base.cut), mirror], self.num_files, False)

    async def _run(self, query: GrepQuery, paths: Iterable[bytes], cwd: Path, *flags: str) -> _Found:
        most = [] if query.limit is None else ["--max-count", str(query.limit + 1)]
        output = await self.ripgrep.search(
            ["--no-ignore", *flags, *most, *query.pattern_flags()],
            paths,
            cwd,
            deadline_s=query.deadline_s,
            max_bytes=query.max_bytes,
        )
        return _Found(await off_loop(len(output.stdout), parse_matches, output), output.cut)


def _keeps(query: GrepQuery, path: bytes, changes: Overlay | None, file: bytes) -> bool:
    """Whether a file of the base is searched: it is in the query's scope and has not changed."""
    if path and file != path and not file.startswith(path + b"/"):
        return False
    return query.includes(file) and (changes is None or not changes.masks(file))


def _result(query: GrepQuery, runs: Sequence[_Found], candidates: int, used_index: bool) -> GrepResult:
    """All runs' matches in order, up to the query's limit."""
    whole = _joined(runs)
    files = sorted(whole.files, key=lambda file: sort_key(file.path))
    truncated = whole.cut
    if query.limit is not None:
        kept: list[FileMatches] = []
        room = query.limit
        for file in files:
            if len(file) > room:
                truncated = True
                file = file.first(room)
            if room:
                kept.append(file)
            room -= len(file)
        files = kept
    return GrepResult(files, truncated, candidates, used_index)


def _joined(runs: Sequence[_Found]) -> _Found:
    return _Found([file for run in runs for file in run.files], any(run.cut for run in runs))


def _parts_by_size(paths: list[bytes]) -> Iterator[list[bytes]]:
    """Splits paths into batches that fit a command line."""
    part: list[bytes] = []
    size = 0
    for path in paths:
        part.append(path)
        size += len(path) + 12
        if size > _ARGUMENT_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
