"""The index of one tree: build, open, search.

    pattern ──> literals that a match must hold ──> grams ──> candidate files ──> ripgrep on these files alone

Ripgrep decides what matches; the index only excludes files. For a pattern that excludes too few, ripgrep
searches the whole tree. The tree must be unchanged since it was indexed, except for edits that an overlay
records.
"""

from __future__ import annotations

import os
from pathlib import Path

from etude.agent.index.grep.builder import sample_ranks, write_segments
from etude.agent.index.grep.manifest import (
    Contents,
    Manifest,
    check_replaceable,
    open_contents,
    write_manifest,
)
from etude.agent.index.grep.overlay import Overlay
from etude.agent.index.grep.query import GrepQuery, GrepResult
from etude.agent.index.grep.ripgrep import Ripgrep, sort_key
from etude.agent.index.grep.search import Searcher
from etude.agent.index.walk import walk
from etude.errors import StoreError
from etude.kit.durable import DRAFTS, whole_directory
from etude.kit.leftovers import sweep
from etude.kit.tasks import finish_in_thread


class GrepIndex:
    """An opened index. Searches may run concurrently, and continue after another index replaced this one."""

    def __init__(self, into: Path, contents: Contents, ripgrep: Ripgrep) -> None:
        """Use `open` or `build`."""
        self.directory = into
        self._searcher = Searcher(contents, ripgrep)

    @classmethod
    def open(cls, into: Path, *, key: str | None = None) -> GrepIndex:
        """Opens an index that `build` made; `key` must equal the one it was built with.

        Raises StoreError for a missing, torn or foreign index, ResourceError without ripgrep.
        """
        contents = open_contents(into)
        if key is not None and contents.manifest.key != key:
            raise StoreError(
                "is of another tree", field="index", received=contents.manifest.key, fix="build it again"
            )
        return cls(into, contents, Ripgrep())

    @classmethod
    async def build(cls, root: Path, into: Path, *, key: str = "") -> GrepIndex:
        """Indexes the files below `root` that are not hidden into the directory `into`, replacing what is
        there.

        `key` names the content (a commit, a template's digest) for `open`. Runs in a thread; a killed build
        leaves the previous index in place, and cancelling waits for the thread. Of concurrent builds the
        last one's index stays.

        Raises ConfigError, StoreError, ResourceError without ripgrep.
        """
        ripgrep = Ripgrep()
        contents = await finish_in_thread(_write, root, into, key)
        return cls(into, contents, ripgrep)

    def overlay(self) -> Overlay:
        """An empty overlay for the edits of one session, searched together with this index."""
        return Overlay(self._searcher.search)

    async def search(self, query: GrepQuery) -> GrepResult:
        """The matches that ripgrep gives on the tree, by path and line.

        Raises ToolArgumentError, with ripgrep's message, for a pattern that it refuses or takes too long for;
        SandboxError if ripgrep cannot be run.
        """
        return await self._searcher.search(query)

    @property
    def root(self) -> Path:
        """Root of the indexed tree."""
        return self._searcher.root

    @property
    def num_files(self) -> int:
        """Files in the index."""
        return self._searcher.num_files

    @property
    def size_bytes(self) -> int:
        """Size of the index on disk."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())


def _write(root: Path, into: Path, key: str) -> Contents:
    """Writes all segments and then the manifest to a draft, opens that, and moves it into place."""
    root = root.resolve()
    check_replaceable(into)
    listing = walk(root)
    paths = sorted(listing.files, key=sort_key)
    files = [(path, listing.files[path].st_size) for path in paths]
    into.parent.mkdir(parents=True, exist_ok=True)
    sweep(into.parent, DRAFTS)
    with whole_directory(into, keep=lambda: False) as draft:
        ranks = sample_ranks(root, paths)
        written = write_segments(root, files, draft, ranks)
        directories = sorted(map(os.fsdecode, listing.directories))
        write_manifest(draft, Manifest(str(root), key, directories, written))
        return open_contents(draft)
