"""Brings the index of a directory up to date: read changed files, cut them, embed new chunks.

Two stages, each in batches with an `await` between them: *cut* (milliseconds a file) makes the words of all
files searchable; *embed* (about 10 ms a chunk on one core) fills in vectors. Every batch is one transaction,
so a build that was cancelled or killed resumes where it stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from etude.agent.index.semantic.embedding import Embedder
from etude.agent.index.semantic.store import CutChunk, FileRow, FileStat, SemanticStore, cut_file, cut_key
from etude.agent.index.walk import walk
from etude.kit.tasks import finish_in_thread

MAX_FILE_BYTES = 1 << 20
"""Larger files are data or generated; they are not indexed."""
_RACY_NS = 1_000_000_000
"""A file changed so shortly before it was read may change again within one tick of its time stamp."""
_UNKNOWN = FileStat(-1, -1, -1, -1)
"""Status of a file that was written while it was read: never equal to a real one."""
_FILES_AT_ONCE = 32
_CHUNKS_AT_ONCE = 128


class Build:
    """One update of one tree."""

    def __init__(self, store: SemanticStore, tree: int, root: Path, embedder: Embedder | None) -> None:
        self._store, self._tree, self._root, self._embedder = store, tree, root, embedder

    async def run(self) -> None:
        """Updates the index. Raises as `walk`, embedder and store."""
        await self._cut()
        if self._embedder is not None:
            await self._embed(self._embedder)

    async def _cut(self) -> None:
        before = await finish_in_thread(self._store.files, self._tree)
        listed = (await finish_in_thread(walk, self._root)).files
        found = {
            os.fsdecode(path): FileStat.of(status)
            for path, status in listed.items()
            if status.st_size <= MAX_FILE_BYTES
        }
        stale = [path for path, stat in sorted(found.items()) if _is_stale(before.get(path), stat)]
        if removed := before.keys() - found.keys():
            await finish_in_thread(self._store.replace, self._tree, removed)
        for start in range(0, len(stale), _FILES_AT_ONCE):
            await finish_in_thread(self._read, before, stale[start : start + _FILES_AT_ONCE])
        await finish_in_thread(self._store.finish, self._tree)

    def _read(self, before: dict[str, FileRow], batch: Sequence[str]) -> None:
        """Cuts files that may have changed."""
        gone: list[str] = []
        rows: list[tuple[FileRow, list[CutChunk] | None]] = []
        for path in batch:
            started_ns = time.time_ns()
            read = _read_file(self._root / path)
            known = before.get(path)
            if read is None:
                gone += [path] if known else []
                continue
            content, stat = read
            newest_ns = max(stat.mtime_ns, stat.ctime_ns)
            trusted = newest_ns < started_ns - _RACY_NS and stat.size_bytes == len(content)
            row = FileRow(path, stat if trusted else _UNKNOWN, blake3(content).digest(), cut_key(path))
            is_same = known is not None and (known.digest, known.cut) == (row.digest, row.cut)
            rows.append((row, None if is_same else cut_file(path, content)))
        self._store.replace(self._tree, gone, rows)

    async def _embed(self, embedder: Embedder) -> None:
        missing = await finish_in_thread(self._store.unembedded, self._tree, embedder.key)
        waiting: dict[bytes, str] = {}
        while missing or waiting:
            while missing and len(waiting) < _CHUNKS_AT_ONCE:
                part, missing = missing[:_CHUNKS_AT_ONCE], missing[_CHUNKS_AT_ONCE:]
                waiting |= await finish_in_thread(self._store.embedding_texts, part)
            batch = {name: waiting.pop(name) for name in list(waiting)[:_CHUNKS_AT_ONCE]}
            await finish_in_thread(self._embed_batch, embedder, batch)

    def _embed_batch(self, embedder: Embedder, batch: dict[bytes, str]) -> None:
        known = self._store.vectors(embedder.key, list(batch))  # another build may have been faster
        new = [name for name in batch if name not in known]
        rows = embedder.embed([batch[name] for name in new]) if new else []
        self._store.add_vectors(self._tree, embedder.key, dict(zip(new, rows, strict=True)))


def _is_stale(known: FileRow | None, stat: FileStat) -> bool:
    return known is None or known.stat != stat or known.cut != cut_key(known.path)


def _read_file(path: Path) -> tuple[bytes, FileStat] | None:
    """A regular file's content and status; None if there is none, or it may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
            stat = FileStat.of(os.fstat(descriptor))
    except OSError:
        return None
    return (content, stat) if len(content) <= MAX_FILE_BYTES else None
