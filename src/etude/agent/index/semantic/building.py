"""Brings what is known of a tree up to date: read what changed, cut it, embed what is new.

Three stages, each in batches with an `await` between them: *cut* (milliseconds a file) makes the words of all
files searchable; *embed* (about 10 ms a chunk on one core) fills in vectors. Every batch is durable, so a
build that was cancelled or killed goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.index.semantic.embedding import Embedder, feed
from etude.agent.index.semantic.merkle import Changes
from etude.agent.index.semantic.records import FileRecord, content_key, make_record
from etude.agent.index.semantic.state import (
    NO_ROW,
    UNKNOWN,
    CutFile,
    FileEntry,
    TreeState,
    assemble,
    empty_state,
)
from etude.agent.index.semantic.store import RecordsGoneError, SemanticStore
from etude.agent.index.semantic.tree import FileStat, Tree

__all__ = ["Build", "BuildProgress", "Pace", "finish_in_thread"]

Result = TypeVar("Result")
_RACY_NS = 1_000_000_000
"""A file changed so shortly before it was read may change again within one tick of its time stamp."""
_FILES_AT_ONCE = 32
_CHUNKS_AT_ONCE = 128
_DEEPEST_PATH = 200
"""Folders; paths below are left out."""
_PUBLISH_EVERY_S = 1.0
_PUBLISH_SHARE = 0.1
"""Of a build's time that may go into states of unfinished builds."""


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is. `done` and `total` count files while it cuts, chunks while it embeds."""

    stage: Literal["cut", "embed"]
    done: int
    total: int
    num_bytes: int
    """Read from the tree so far."""


class Pace:
    """Works for at most `share` of the time, by resting after each piece of work."""

    def __init__(self, share: float) -> None:
        self._rest_for_work = (1 - share) / share

    async def rest(self, worked_s: float) -> None:
        """Gives way to other tasks, and sleeps if that is asked for."""
        await asyncio.sleep(worked_s * self._rest_for_work)


async def finish_in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Like `asyncio.to_thread`, but a cancelled caller waits: nothing goes on behind it."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


class Build:
    """One update of one tree. `publish` is given each new state, the last one complete, in a thread."""

    def __init__(
        self,
        store: SemanticStore,
        tree: Tree,
        embedder: Embedder | None,
        publish: Callable[[TreeState], None],
        progress: Callable[[BuildProgress], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._store = store
        self._tree = tree
        self._embedder = embedder
        self._model = embedder.key if embedder else ""
        self._publish = publish
        self._progress = progress or (lambda _: None)
        self._pace = pace or Pace(1.0)
        self._num_bytes = 0

    async def run(self, before: TreeState) -> Changes:
        """Updates from `before`; gives what differed. Raises what tree, embedder and store raise."""
        try:
            state = await self._cut_and_store(before)
        except RecordsGoneError:
            # Another process pruned the store in between: all files are read again, vectors are still found.
            state = await self._cut_and_store(empty_state())
        if self._embedder is not None and (state.rows == NO_ROW).any():
            state = await self._embed(self._embedder, state)
            await finish_in_thread(self._store.publish, self._tree.key, self._model, state)
        return await finish_in_thread(lambda: state.merkle.changes_since(before.merkle))

    async def _cut_and_store(self, before: TreeState) -> TreeState:
        state = await self._cut(before)
        if state is not before:
            await finish_in_thread(self._store.publish, self._tree.key, self._model, state)
        await finish_in_thread(self._publish, state)
        return state

    async def _cut(self, before: TreeState) -> TreeState:
        """The state of the tree as it is now; new chunks have places of vectors only if they are known."""
        same, stale = await finish_in_thread(self._compare, before)
        if before.scanned and not stale and len(same) == len(before.paths):
            return before
        done: list[FileEntry] = []
        last_s, cost_s = time.monotonic(), _PUBLISH_EVERY_S * _PUBLISH_SHARE
        for start in range(0, len(stale), _FILES_AT_ONCE):
            began_s = time.monotonic()
            batch = stale[start : start + _FILES_AT_ONCE]
            done += await finish_in_thread(self._read, before, batch)
            self._progress(
                BuildProgress("cut", len(same) + start + len(batch), len(same) + len(stale), self._num_bytes)
            )
            await self._pace.rest(time.monotonic() - began_s)
            if not before.scanned and time.monotonic() - last_s > cost_s / _PUBLISH_SHARE:
                began_s = time.monotonic()
                state = await finish_in_thread(self._assemble, before, [*same, *done], False)
                await finish_in_thread(self._publish, state)
                last_s = time.monotonic()
                cost_s = max(last_s - began_s, _PUBLISH_EVERY_S * _PUBLISH_SHARE)
        return await finish_in_thread(self._assemble, before, [*same, *done], True)

    def _compare(self, before: TreeState) -> tuple[list[FileEntry], list[tuple[str, FileStat]]]:
        """Files whose stat is as it was, and all others."""
        same: list[FileEntry] = []
        stale: list[tuple[str, FileStat]] = []
        for path, found in self._tree.scan():
            if path.count("/") >= _DEEPEST_PATH:
                continue
            index = before.index_of.get(path)
            if index is not None and tuple(before.stats[index].tolist()) == found:
                digest, key = before.digests[index].tobytes(), before.records[index].tobytes()
                if key == content_key(path, digest):
                    same.append(FileEntry(path, digest, key, found, None))
                    continue
            stale.append((path, found))
        return same, stale

    def _read(self, before: TreeState, batch: Sequence[tuple[str, FileStat]]) -> list[FileEntry]:
        """Entries of files that may have changed, without those that are gone or unreadable."""
        entries: list[FileEntry] = []
        records: dict[bytes, FileRecord] = {}
        read: list[tuple[str, FileStat, bytes, bytes]] = []
        for path, found in batch:
            started_ns = time.time_ns()
            content = self._tree.read(path)
            if content is None:
                continue
            self._num_bytes += len(content)
            digest = blake3(content).digest()
            trusted = (
                found
                if found.newest_ns < started_ns - _RACY_NS and found.size_bytes == len(content)
                else UNKNOWN
            )
            key = content_key(path, digest)
            index = before.index_of.get(path)
            if index is not None and before.records[index].tobytes() == key:
                entries.append(FileEntry(path, digest, key, trusted, None))
                continue
            read.append((path, trusted, digest, key))
            records[key] = self._record(path, content, key)
        self._store.add_records(records)
        entries += [
            FileEntry(path, d, key, stat, CutFile.of(path, records[key])) for path, stat, d, key in read
        ]
        return entries

    def _record(self, path: str, content: bytes, key: bytes) -> FileRecord:
        return self._store.records([key]).get(key) or make_record(path, content)

    def _assemble(self, before: TreeState, entries: Sequence[FileEntry], scanned: bool) -> TreeState:
        return self._store.located(self._model, assemble(before, entries, scanned=scanned))

    async def _embed(self, embedder: Embedder, state: TreeState) -> TreeState:
        """The state with all its vectors; states on the way are published once a second."""
        missing = np.flatnonzero(state.rows == NO_ROW)
        chunks_of: dict[bytes, list[int]] = {}
        for chunk in missing.tolist():
            chunks_of.setdefault(state.hashes[chunk].tobytes(), []).append(chunk)
        files = np.unique(state.file_of_chunk[missing]).tolist()
        rows, done, last_s = np.array(state.rows), state.num_chunks - len(missing), time.monotonic()
        waiting: dict[bytes, str] = {}
        while files or waiting:
            began_s = time.monotonic()
            while files and len(waiting) < _CHUNKS_AT_ONCE:
                waiting |= await finish_in_thread(self._feeds, state, files.pop(0), chunks_of.keys())
            batch = {name: waiting.pop(name) for name in list(waiting)[:_CHUNKS_AT_ONCE]}
            places, generation = await finish_in_thread(self._embed_batch, embedder, batch)
            if generation != state.generation:
                state = await finish_in_thread(self._store.located, embedder.key, state.with_rows(rows, -1))
                rows = np.array(state.rows)
            for name, place in zip(batch, places.tolist(), strict=True):
                chunks = chunks_of.pop(name)
                rows[chunks] = place
                done += len(chunks)
            self._progress(BuildProgress("embed", done, state.num_chunks, self._num_bytes))
            if time.monotonic() - last_s > _PUBLISH_EVERY_S or not chunks_of:
                state = state.with_rows(rows.copy(), generation)
                await finish_in_thread(self._publish, state)
                last_s = time.monotonic()
            await self._pace.rest(time.monotonic() - began_s)
        return state

    def _feeds(self, state: TreeState, index: int, wanted: KeysView[bytes]) -> dict[bytes, str]:
        """What is to be embedded of one file, by name of the vector."""
        key = state.records[index].tobytes()
        record = self._store.records([key]).get(key)
        if record is None:
            raise RecordsGoneError("a record vanished during a build", fix="update again")
        chunks = zip(record.hashes, record.chunks, strict=True)
        return {name: feed(chunk.symbol, chunk.text) for name, chunk in chunks if name in wanted}

    def _embed_batch(self, embedder: Embedder, batch: dict[bytes, str]) -> tuple[NDArray[np.int32], int]:
        """Rows of a batch's vectors and their generation, once all are on disk."""
        hashes = np.frombuffer(b"".join(batch), np.uint8).reshape(len(batch), -1)
        known, _ = self._store.places(embedder.key, hashes)
        # Another process may have embedded some of them meanwhile.
        names = [name for name, place in zip(batch, known.tolist(), strict=True) if place == NO_ROW]
        if names:
            self._store.add_vectors(embedder.key, names, embedder.embed([batch[name] for name in names]))
        return self._store.places(embedder.key, hashes)
