"""Semantic search over a tree of source files: which functions and classes answer a question in words."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.semantic.building import Build, BuildProgress, Pace, finish_in_thread
from etude.agent.index.semantic.embedding import Embedder, feed
from etude.agent.index.semantic.merkle import Changes
from etude.agent.index.semantic.overlay import Edits, Overlay
from etude.agent.index.semantic.paths import path_filter
from etude.agent.index.semantic.records import HASH_BYTES
from etude.agent.index.semantic.state import NO_ROW, TreeState, empty_state
from etude.agent.index.semantic.store import SemanticStore
from etude.agent.index.semantic.tree import Tree
from etude.agent.index.semantic.vectors import VectorFile
from etude.agent.index.semantic.words import question_terms
from etude.errors import StoreError, ToolArgumentError

__all__ = ["Comparison", "Hit", "SearchResult", "SemanticIndex"]

MAX_FRESH_CHUNKS = 128
"""Chunks of edited files that one search embeds: a second or two. The rest waits for the next search."""
_KEPT_VECTORS = 20_000
"""Of edited chunks, for all overlays together: 30 MB with the default model."""
VECTOR_SHARE = 0.7
"""Of a score; the rest is BM25's. Chosen on the development half (docs/code-index.md)."""
_UNSEEN_COSINE = 0.5
"""What a chunk without a vector is given for its cosine, times its share of the best BM25 score."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that answers."""

    path: str
    first_line: int
    """From 1."""
    last_line: int
    """Inclusive."""
    symbol: str
    """`Class.method`; "" for lines between definitions."""
    score: float
    """Comparable within one result only."""
    text: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits, best first, and how far to trust their absence."""

    hits: tuple[Hit, ...]
    complete: bool
    """False while the index is being built or brought up to date, or while edits wait to be embedded."""
    semantic: bool
    """False if there is no embedder: words alone were compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A question against each chunk that a search may return."""

    chunks: NDArray[np.int64]
    """[chunks]: numbers that `SemanticIndex.describe` understands."""
    cosines: NDArray[np.float32] | None
    """[chunks], NaN where there is no vector yet; None without an embedder."""
    words: NDArray[np.float32]
    """[chunks]: BM25."""


@dataclass(frozen=True, slots=True)
class _View:
    """A state with the vectors that its rows name."""

    state: TreeState
    vectors: VectorFile | None


class SemanticIndex:
    """Search over one tree. One event loop uses it; other processes may use the same store.

    Make it with `open`. Without an embedder it ranks by words alone.
    """

    def __init__(self, store: SemanticStore, tree: Tree, embedder: Embedder | None) -> None:
        self._store = store
        self._tree = tree
        self._embedder = embedder
        self._view = _View(empty_state(), None)
        self._updating = 0
        self._one_update = asyncio.Lock()
        self._fresh = _VectorCache(_KEPT_VECTORS)

    @classmethod
    async def open(cls, folder: Path, tree: Tree, embedder: Embedder | None = None) -> SemanticIndex:
        """Opens or makes the store in `folder` and takes what it knows of `tree`; reads nothing of the tree.

        Raises `StoreError` for a store that is damaged or of another version.
        """
        return await finish_in_thread(cls._open, folder, tree, embedder)

    @classmethod
    def _open(cls, folder: Path, tree: Tree, embedder: Embedder | None) -> SemanticIndex:
        store = SemanticStore(folder)
        try:
            index = cls(store, tree, embedder)
            state = store.load(tree.key, embedder.key if embedder else "")
            if state is not None:
                index._show(state)
        except BaseException:
            store.close()
            raise
        return index

    async def close(self) -> None:
        """Closes the store. Cancel an update before."""
        async with self._one_update:
            await finish_in_thread(self._store.close)

    @property
    def num_chunks(self) -> int:
        return self._view.state.num_chunks

    @property
    def root(self) -> bytes:
        """Merkle root of the files that searches see, edits aside."""
        return self._view.state.merkle.root

    async def update(
        self, progress: Callable[[BuildProgress], None] | None = None, share: float = 1.0
    ) -> Changes:
        """Brings the index up to date with its tree, and gives the files that differed.

        Searches go on meanwhile and say that they are not complete.
        `progress` is called in the event loop. `share`: of the time that may be worked, in (0, 1]. Cancelling
        waits for the batch in work (a second or two) and loses nothing. A second update waits for the first.
        """
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], not {share}")
        self._updating += 1
        try:
            async with self._one_update:
                build = Build(self._store, self._tree, self._embedder, self._show, progress, Pace(share))
                return await build.run(self._view.state)
        finally:
            self._updating -= 1

    def overlay(self) -> Overlay:
        """An empty set of edits over this index."""
        return Overlay(self)

    async def search(
        self, question: str, k: int = 10, paths: Sequence[str] | None = None, *, edits: Edits | None = None
    ) -> SearchResult:
        """The `k` chunks that answer best. `paths`: see `path_filter`.

        Raises `ToolArgumentError` for an empty question, a `k` below 1 or a senseless path pattern.
        """
        if not question.strip():
            raise ToolArgumentError("the question is empty", field="query")
        if k < 1:
            raise ToolArgumentError("at least one result has to be asked for", field="k", received=k)
        wanted = path_filter(paths) if paths else None
        view, idle = self._view, self._updating == 0
        result = await finish_in_thread(self._search, view, question, k, wanted, edits or Edits())
        return SearchResult(result.hits, result.complete and idle, result.semantic)

    def _show(self, state: TreeState) -> None:
        """Lets searches see `state`. Maps what vectors were added since."""
        vectors = self._view.vectors
        if self._embedder is not None and state.num_chunks:
            highest = int(state.rows.max())
            if (
                vectors is None
                or highest >= vectors.num_rows
                or state.generation != self._view.state.generation
            ):
                vectors, generation = self._store.vector_file(self._embedder.key, self._embedder.dimension)
                if generation != state.generation:
                    state = self._store.located(self._embedder.key, state)
        self._view = _View(state, vectors)

    async def compare(
        self, question: str, paths: Sequence[str] | None = None, *, edits: Edits | None = None
    ) -> Comparison:
        """What a search decides by, for measurements and tuning. Raises like `path_filter`."""
        wanted = path_filter(paths) if paths else None
        return await finish_in_thread(self._compare, self._view, question, wanted, edits or Edits())

    async def describe(self, chunks: NDArray[np.int64], edits: Edits | None = None) -> tuple[Hit, ...]:
        """The chunks of a `Comparison`, with score 0, as long as the index was not updated since."""
        nothing = np.zeros(len(chunks), dtype=np.float32)
        return await finish_in_thread(self._hits, self._view.state, edits or Edits(), chunks, nothing)

    def _search(
        self, view: _View, question: str, k: int, wanted: Callable[[str], bool] | None, edits: Edits
    ) -> SearchResult:
        found = self._compare(view, question, wanted, edits)
        if found.cosines is None:
            scores, complete = found.words, view.state.scanned
        else:
            scores = fuse_scores(found.cosines, found.words)
            complete = view.state.scanned and not bool(np.isnan(found.cosines).any())
        order = best(scores, k)
        if found.cosines is None:
            order = order[scores[order] > 0]
        hits = self._hits(view.state, edits, found.chunks[order], scores[order])
        return SearchResult(hits, complete, found.cosines is not None)

    def _compare(
        self, view: _View, question: str, wanted: Callable[[str], bool] | None, edits: Edits
    ) -> Comparison:
        state = view.state
        masked = edits.masked(state)
        allowed = np.ones(state.num_chunks + sum(len(f.record().chunks) for f in edits.files), dtype=bool)
        allowed[masked] = False
        if wanted is not None:
            files = np.array([wanted(path) for path in state.paths], dtype=bool)
            allowed[: state.num_chunks] &= files[state.file_of_chunk]
            fresh = [wanted(file.path) for file in edits.files for _ in file.record().chunks]
            allowed[state.num_chunks :] = fresh
        chosen = np.flatnonzero(allowed)
        words = state.lexicon.score(question_terms(question), edits.terms(), masked)[chosen]
        if self._embedder is None:
            return Comparison(chosen, None, words)
        return Comparison(chosen, self._cosines(self._embedder, view, question, edits, chosen), words)

    def _cosines(
        self, embedder: Embedder, view: _View, question: str, edits: Edits, chosen: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """[chosen]: NaN where a chunk has no vector yet."""
        asked = embedder.embed_question(question)
        num_base = view.state.num_chunks
        cosines = np.full(len(chosen), np.nan, dtype=np.float32)
        in_base = chosen < num_base
        rows = view.state.rows[chosen[in_base]]
        known = np.flatnonzero(rows != NO_ROW)
        if view.vectors is not None and len(known):
            cosines[np.flatnonzero(in_base)[known]] = view.vectors.products(asked, rows[known])
        hashes = [name for file in edits.files for name in file.record().hashes]
        if hashes:
            texts = [feed(c.symbol, c.text) for file in edits.files for c in file.record().chunks]
            wanted = (chosen[~in_base] - num_base).tolist()
            part = self._fresh_vectors(embedder, [hashes[i] for i in wanted], [texts[i] for i in wanted])
            cosines[~in_base] = part @ asked
        return cosines

    def _fresh_vectors(
        self, embedder: Embedder, hashes: list[bytes], texts: list[str]
    ) -> NDArray[np.float32]:
        """[hashes, dimension] of edited chunks: stored, kept from before, or embedded now; else NaN."""
        result = np.full((len(hashes), embedder.dimension), np.nan, dtype=np.float32)
        if not hashes:
            return result
        unknown = self._fresh.missing(hashes)
        names = np.frombuffer(b"".join(unknown), np.uint8).reshape(-1, HASH_BYTES)
        self._fresh.add(self._store.vectors(embedder.key, embedder.dimension, names))
        # What was written last is what is asked for most likely.
        feeds = dict(zip(reversed(hashes), reversed(texts), strict=True))
        new = [name for name in feeds if name in set(self._fresh.missing(hashes))][:MAX_FRESH_CHUNKS]
        if new:
            self._fresh.add(dict(zip(new, embedder.embed([feeds[name] for name in new]), strict=True)))
        for index, name in enumerate(hashes):
            vector = self._fresh.get(name)
            if vector is not None:
                result[index] = vector
        return result

    def _hits(
        self, state: TreeState, edits: Edits, chunks: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> tuple[Hit, ...]:
        fresh = [(file.path, chunk) for file in edits.files for chunk in file.record().chunks]
        in_base = chunks[chunks < state.num_chunks]
        keys = {int(i): state.records[state.file_of_chunk[i]].tobytes() for i in in_base}
        records = self._store.records(set(keys.values()))
        hits: list[Hit] = []
        for number, score in zip(chunks.tolist(), scores.tolist(), strict=True):
            if number >= state.num_chunks:
                path, chunk = fresh[number - state.num_chunks]
            else:
                file = int(state.file_of_chunk[number])
                path = state.paths[file]
                if keys[number] not in records:
                    raise StoreError("the store was pruned under an open index", fix="open it again")
                chunk = records[keys[number]].chunks[number - int(state.starts[file])]
            hits.append(Hit(path, chunk.first_line, chunk.last_line, chunk.symbol, score, chunk.text))
        return tuple(hits)


class _VectorCache:
    """The vectors used last, by hash."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._vectors: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def missing(self, names: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            return [name for name in dict.fromkeys(names) if name not in self._vectors]

    def get(self, name: bytes) -> NDArray[np.float32] | None:
        with self._lock:
            if name in self._vectors:
                self._vectors.move_to_end(name)
            return self._vectors.get(name)

    def add(self, vectors: dict[bytes, NDArray[np.float32]]) -> None:
        with self._lock:
            self._vectors.update(vectors)
            while len(self._vectors) > self._size:
                self._vectors.popitem(last=False)


def fuse_scores(
    cosines: NDArray[np.float32], words: NDArray[np.float32], share: float = VECTOR_SHARE
) -> NDArray[np.float32]:
    """`share` * cosine + (1 - `share`) * BM25 as a part of its best.

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
        # All that reach the lowest score that gets in, so that equal scores do not depend on the partition.
        least = np.partition(scores, len(scores) - num)[len(scores) - num]
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:num]
