"""Semantic search over a directory of source files: which functions and classes answer a question in words.

update    walk ──> read and cut changed files ──> words in FTS5 ──> embed new chunks ──> vectors
search    question ──> BM25 of all chunks, cosines of all chunks ──> one score ──> the best
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.semantic.building import Build
from etude.agent.index.semantic.embedding import Embedder, embedding_text
from etude.agent.index.semantic.overlay import SYMBOL_WEIGHT, Edits, Overlay
from etude.agent.index.semantic.store import STORED, SemanticStore
from etude.agent.index.semantic.words import question_stems
from etude.agent.tools.ports import CodeHit, CodeHits
from etude.errors import ToolArgumentError
from etude.kit.tasks import finish_in_thread

MAX_FRESH_CHUNKS = 128
"""Chunks of edited files that one search embeds: a second or two. The rest waits for the next search."""
VECTOR_SHARE = 0.7
"""Of a score; the rest is BM25's. Chosen on the development half (docs/code-index.md)."""
_UNSEEN_COSINE = 0.5
"""Cosine assumed for a chunk without a vector, scaled by its share of the best BM25 score."""
_BLOCK_ROWS = 4096
"""Rows turned into float32 at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Scores of each chunk for a question: the index's chunks by path and line, then those of edits."""

    cosines: NDArray[np.float32] | None
    """[chunks], NaN where there is no vector yet; None without an embedder."""
    words: NDArray[np.float32]
    """[chunks]: BM25."""
    allowed: NDArray[np.bool_]
    """[chunks]: those that may be found."""


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """In-memory data of one revision of a tree, shared by searches."""

    revision: int
    scanned: bool
    chunks: NDArray[np.int64]
    """[chunks]: numbers in the database, by path and line."""
    paths: tuple[str, ...]
    file_of: NDArray[np.int32]
    """[chunks]: index of its file in `paths`."""
    vectors: NDArray[np.float16] | None
    """[chunks, dimension], NaN where there is none yet."""
    num_words: int


_Embedded = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Vectors of a question [dimension] and of edited chunks [edited chunks, dimension]."""


class SemanticIndex:
    """Search over one directory. One event loop uses it; other processes may use the same store.

    Make it with `open`. Without an embedder it ranks by words alone.
    """

    def __init__(self, store: SemanticStore, root: Path, embedder: Embedder | None) -> None:
        self._store, self._root, self._embedder = store, root, embedder
        self._tree = store.tree(f"directory:{root}")
        self._view: _View | None = None
        self._updating = 0
        self._one_update = asyncio.Lock()

    @classmethod
    async def open(cls, folder: Path, root: Path, embedder: Embedder | None = None) -> SemanticIndex:
        """Opens or makes the store in `folder` with its entries for `root`; does not read `root` itself.

        Raises StoreError for a store that is damaged or of another version, ResourceError without FTS5.
        """

        def make() -> SemanticIndex:
            store = SemanticStore(folder)
            try:
                return cls(store, root.resolve(), embedder)
            except BaseException:
                store.close()
                raise

        return await finish_in_thread(make)

    async def close(self) -> None:
        """Closes the store, after a running update: cancel that first."""
        async with self._one_update:
            await finish_in_thread(self._store.close)

    async def delete_entries(self) -> None:
        """Removes from the store the entries of the directory, but for vectors. Only `close` may follow."""
        async with self._one_update:
            await finish_in_thread(self._store.drop, self._tree)

    async def update(self) -> None:
        """Brings the index up to date with its directory.

        Concurrent searches work and report themselves incomplete. Cancelling waits for the current batch (a
        second or two) and loses nothing. A second update waits for the first. Raises ConfigError if the root
        is no directory.
        """
        self._updating += 1
        try:
            async with self._one_update:
                await Build(self._store, self._tree, self._root, self._embedder).run()
        finally:
            self._updating -= 1

    def overlay(self) -> Overlay:
        """An empty set of edits over this index."""
        return Overlay(self._search_edited)

    async def search(self, question: str, k: int = 10, path: str = "") -> CodeHits:
        """The `k` chunks that answer best, of the file `path` or below the directory `path`, best first.

        Not `complete` while the index is brought up to date, or edits wait to be embedded.

        Raises ToolArgumentError for an empty question or a `k` below 1.
        """
        return await self._search_edited(question, k, path, Edits())

    async def _search_edited(self, question: str, k: int, path: str, edits: Edits) -> CodeHits:
        if not question.strip():
            raise ToolArgumentError("the question is empty", field="query")
        if k < 1:
            raise ToolArgumentError("at least one result has to be asked for", field="k", received=k)
        idle = self._updating == 0
        found = await finish_in_thread(self._search, question, k, path.strip("/"), edits)
        return replace(found, complete=found.complete and idle)

    async def compare(self, question: str) -> Comparison:
        """The scores that a search ranks by, for measurements and tuning."""
        return await finish_in_thread(
            lambda: self._compare(question, "", Edits(), self._embedded(question, Edits()))
        )

    async def describe(self, chunks: NDArray[np.int64]) -> tuple[CodeHit, ...]:
        """The chunks at indices of a `Comparison`, with score 0; valid while the index is unchanged."""
        nothing = np.zeros(len(chunks), np.float32)
        return await finish_in_thread(lambda: self._hits(self._current(), chunks, nothing, Edits()))

    def _search(self, question: str, k: int, path: str, edits: Edits) -> CodeHits:
        embedded = self._embedded(question, edits)
        with self._store.reading():  # chunks and their scores must come from one snapshot
            found, view = self._compare(question, path, edits, embedded), self._current()
            complete, scores, least = view.scanned, found.words, 0.0
            if found.cosines is not None:
                complete = complete and not bool(np.isnan(found.cosines[found.allowed]).any())
                scores, least = fuse_scores(found.cosines, found.words), -np.inf
            scores = np.where(found.allowed, scores, -np.inf).astype(np.float32)
            order = best(scores, k)
            order = order[scores[order] > least]
            return CodeHits(self._hits(view, order, scores[order], edits), complete)

    def _compare(self, question: str, path: str, edits: Edits, embedded: _Embedded | None) -> Comparison:
        with self._store.reading() as database:
            view = self._current()
            words = self._score_words(database, view, question_stems(question), edits)
        wanted = [_is_below(file, path) and not hidden for file, hidden in edits.hidden(view.paths)]
        fresh_wanted = [_is_below(file, path) for file, _ in edits.chunks]
        allowed = np.concatenate([np.array(wanted, np.bool_)[view.file_of], np.array(fresh_wanted, np.bool_)])
        words[~allowed] = 0
        if embedded is None or view.vectors is None:
            return Comparison(None, words, allowed)
        question_vector, fresh = embedded
        cosines = np.concatenate([_products(view.vectors, question_vector), fresh @ question_vector])
        return Comparison(cosines, words, allowed)

    def _score_words(
        self, database: sqlite3.Connection, view: _View, words: list[str], edits: Edits
    ) -> NDArray[np.float32]:
        """[chunks]: BM25 of the index's chunks by FTS5, then of the edited ones."""
        scores = np.zeros(len(view.chunks), np.float32)
        if words:
            table = f"words_{self._tree}"
            found = database.execute(
                f"SELECT rowid, -bm25({table}, {SYMBOL_WEIGHT}, 1, 1) FROM {table} WHERE {table} MATCH ?",
                (" OR ".join(f'"{word}"' for word in words),),
            )
            values = np.array(found.fetchall(), np.float64).reshape(-1, 2)
            order = np.argsort(view.chunks)
            places = np.searchsorted(view.chunks, values[:, 0], sorter=order)
            scores[order[places]] = values[:, 1]
        if not edits.files:
            return scores
        holders = dict(self._store.select(f"SELECT term, doc FROM terms_{self._tree} WHERE term", words))
        return np.concatenate([scores, edits.score(words, len(view.chunks), view.num_words, holders)])

    def _embedded(self, question: str, edits: Edits) -> _Embedded | None:
        """The question's vector, and those of edited chunks (NaN beyond `MAX_FRESH_CHUNKS` new ones)."""
        embedder = self._embedder
        if embedder is None:
            return None
        chunks = {cut.vector: cut.chunk for _, cut in edits.chunks}
        kept = edits.vectors
        kept |= self._store.vectors(embedder.key, [name for name in chunks if name not in kept])
        # The latest edits are the most likely to be searched for.
        new = [name for name in reversed(chunks) if name not in kept][:MAX_FRESH_CHUNKS]
        if new:
            rows = embedder.embed([embedding_text(chunks[name].symbol, chunks[name].text) for name in new])
            kept |= dict(zip(new, rows, strict=True))
        unknown = np.full(embedder.dimension, np.nan, np.float32)
        rows = [kept.get(cut.vector, unknown) for _, cut in edits.chunks]
        for name in kept.keys() - chunks.keys():
            kept.pop(name, None)
        fresh = np.array(rows, np.float32).reshape(-1, embedder.dimension)
        return embedder.embed_question(question), fresh

    def _hits(
        self, view: _View, chunks: NDArray[np.int64], scores: NDArray[np.float32], edits: Edits
    ) -> tuple[CodeHit, ...]:
        fresh, num_base = edits.chunks, len(view.chunks)
        columns = "SELECT id, first_line, last_line, symbol, text FROM chunks WHERE id"
        wanted = view.chunks[chunks[chunks < num_base]].tolist()
        rows = {row[0]: row[1:] for row in self._store.select(columns, wanted)}
        hits: list[CodeHit] = []
        for number, score in zip(chunks.tolist(), scores.tolist(), strict=True):
            if number < num_base:
                path = view.paths[view.file_of[number]]
                first, last, symbol, text = rows[int(view.chunks[number])]
            else:
                path, cut = fresh[number - num_base]
                chunk = cut.chunk
                first, last, symbol, text = chunk.first_line, chunk.last_line, chunk.symbol, chunk.text
            hits.append(CodeHit(path, first, last, symbol, score, text))
        return tuple(hits)

    def _current(self) -> _View:
        """The view of the tree's current revision in the database."""
        with self._store.reading() as database:
            revision, scanned = database.execute(
                "SELECT revision, scanned FROM trees WHERE id = ?", (self._tree,)
            ).fetchone()
            if self._view is None or self._view.revision != revision:
                self._view = self._load(database, revision, bool(scanned))
            return self._view

    def _load(self, database: sqlite3.Connection, revision: int, scanned: bool) -> _View:
        model = self._embedder.key if self._embedder else ""
        rows = database.execute(
            "SELECT c.id, f.path, c.num_words, v.numbers FROM files f JOIN chunks c ON c.file = f.id"
            " LEFT JOIN vectors v ON v.model = ? AND v.name = c.vector WHERE f.tree = ?"
            " ORDER BY f.path, c.first_line",
            (model, self._tree),
        ).fetchall()
        places: dict[str, int] = {}
        file_of = [places.setdefault(os.fsdecode(row[1]), len(places)) for row in rows]
        vectors = None
        if self._embedder is not None:
            unknown = np.full(self._embedder.dimension, np.nan, STORED).tobytes()
            blob = b"".join(row[3] or unknown for row in rows)
            vectors = np.frombuffer(blob, STORED).reshape(len(rows), self._embedder.dimension)
        return _View(
            revision,
            scanned,
            np.array([row[0] for row in rows], np.int64),
            tuple(places),
            np.array(file_of, np.int32),
            vectors,
            sum(row[2] for row in rows),
        )


def _is_below(path: str, directory: str) -> bool:
    return directory in ("", ".", path) or path.startswith(directory + "/")


def _products(vectors: NDArray[np.float16], question: NDArray[np.float32]) -> NDArray[np.float32]:
    """[rows]: dot product of the question with each row."""
    result = np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), _BLOCK_ROWS):
        block = vectors[start : start + _BLOCK_ROWS].astype(np.float32)
        result[start : start + len(block)] = block @ question
    return result


def fuse_scores(
    cosines: NDArray[np.float32], words: NDArray[np.float32], share: float = VECTOR_SHARE
) -> NDArray[np.float32]:
    """`share` * cosine + (1 - `share`) * BM25 as a fraction of the best BM25.

    Cosines of one model have one scale for all questions, BM25 has none. `cosines`: NaN for chunks that have
    no vector yet; these are ranked by their words.
    """
    best_words = float(words.max(initial=0))
    relative = words / best_words if best_words > 0 else np.zeros_like(words)
    known = np.where(np.isnan(cosines), relative * _UNSEEN_COSINE, cosines)
    return (share * known + (1 - share) * relative).astype(np.float32)


def best(scores: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    """Indices of the `num` highest, highest first, earlier ones first among equals."""
    num = min(num, len(scores))
    if num < len(scores):
        # Includes all ties with the lowest selected score, so that ties do not depend on the partition.
        least = np.partition(scores, len(scores) - num)[len(scores) - num]
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:num]
