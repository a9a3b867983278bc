"""BM25 over the words of chunks ("The Probabilistic Relevance Framework", 2009), in numpy.

Why our own: postings must be memory-mapped, take part of an old index over without its texts, and be searched
together with documents that were edited a moment ago. That is less code than adapting a library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lexicon", "TermCounts"]

K1 = 2.0
"""How slowly the second and third occurrence of a word stop to count. Chosen on the development half."""
B = 0.75
"""How much long chunks are held against themselves."""
_LARGEST_COUNT = 255


@dataclass(frozen=True, slots=True, eq=False)
class TermCounts:
    """How often which term occurs in which of a row of documents: one entry for each pair."""

    num_docs: int
    docs: NDArray[np.int32]
    terms: NDArray[np.uint32]
    counts: NDArray[np.uint8]

    @classmethod
    def of(cls, documents: Sequence[Mapping[int, int]]) -> TermCounts:
        """From one mapping (term -> occurrences) for each document."""
        sizes = [len(document) for document in documents]
        return cls(
            len(documents),
            np.repeat(np.arange(len(documents), dtype=np.int32), sizes),
            np.array([term for document in documents for term in document], dtype=np.uint32),
            np.array([count for document in documents for count in document.values()], dtype=np.uint8),
        )

    @classmethod
    def joined(cls, parts: Sequence[TermCounts]) -> TermCounts:
        """The documents of all parts, one part after the other."""
        if not parts:
            return cls.of([])
        offsets = np.cumsum([0] + [part.num_docs for part in parts])
        return cls(
            int(offsets[-1]),
            np.concatenate(
                [part.docs + np.int32(offset) for part, offset in zip(parts, offsets[:-1], strict=True)]
            ),
            np.concatenate([part.terms for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    def renumbered(self, numbers: NDArray[np.int32], num_docs: int) -> TermCounts:
        """The same entries with document i as `numbers[i]` among `num_docs`; those with -1 are dropped."""
        docs = numbers[self.docs]
        kept = docs >= 0
        return TermCounts(num_docs, docs[kept], self.terms[kept], self.counts[kept])

    @property
    def lengths(self) -> NDArray[np.float32]:
        """[num_docs]: all occurrences of a document."""
        return np.bincount(self.docs, self.counts, self.num_docs).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Lexicon:
    """Postings: for each term the documents that hold it, in order. Arrays may be mapped; none is written."""

    terms: NDArray[np.uint32]
    """[terms], ascending."""
    starts: NDArray[np.int64]
    """[terms + 1]: where each term's documents begin in `docs`."""
    docs: NDArray[np.int32]
    counts: NDArray[np.uint8]
    lengths: NDArray[np.float32]
    """[documents]"""

    @classmethod
    def build(cls, entries: TermCounts) -> Lexicon:
        """Sorts entries. Two of one document and term become one with both counts."""
        pairs = entries.terms.astype(np.uint64) << np.uint64(32) | entries.docs.astype(np.uint64)
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        is_first = np.concatenate([np.ones(min(1, len(pairs)), dtype=bool), pairs[1:] != pairs[:-1]])
        firsts = np.flatnonzero(is_first)
        sums = np.add.reduceat(entries.counts[order].astype(np.int64), firsts) if len(firsts) else firsts
        counts = np.minimum(sums, _LARGEST_COUNT).astype(np.uint8)
        pairs = pairs[firsts]
        docs = (pairs & np.uint64(0xFFFFFFFF)).astype(np.int32)
        terms, sizes = np.unique((pairs >> np.uint64(32)).astype(np.uint32), return_counts=True)
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        lengths = np.bincount(docs, counts, entries.num_docs).astype(np.float32)
        return cls(terms, starts, docs, counts, lengths)

    @property
    def num_docs(self) -> int:
        return len(self.lengths)

    def entries(self) -> TermCounts:
        """What `build` was given, duplicates joined."""
        return TermCounts(self.num_docs, self.docs, np.repeat(self.terms, np.diff(self.starts)), self.counts)

    def score(
        self, question: Mapping[int, int], more: TermCounts, without: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """[documents + more.num_docs]: BM25 of the lexicon's documents and of `more`, in one scale.

        `without`: documents that `more` replaces; they count in no statistics, and their scores mean nothing.
        """
        scores = np.zeros(self.num_docs + more.num_docs, dtype=np.float32)
        more_lengths = more.lengths
        num_docs = self.num_docs - len(without) + more.num_docs
        if num_docs <= 0:
            return scores
        total = float(self.lengths.sum()) - float(self.lengths[without].sum()) + float(more_lengths.sum())
        average = max(total / num_docs, 1e-6)
        gone = np.zeros(self.num_docs, dtype=bool)
        gone[without] = True
        for term, times in question.items():
            docs, counts = self._postings(term)
            held = more.terms == term
            frequency = len(docs) + int(held.sum()) - (int(gone[docs].sum()) if len(without) else 0)
            weight = times * np.log1p((num_docs - frequency + 0.5) / (frequency + 0.5))
            scores[docs] += weight * _saturated(counts, self.lengths[docs] / average)
            extra = more.docs[held]
            scores[self.num_docs + extra] += weight * _saturated(
                more.counts[held], more_lengths[extra] / average
            )
        return scores

    def _postings(self, term: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        place = int(np.searchsorted(self.terms, np.uint32(term)))
        if place == len(self.terms) or self.terms[place] != term:
            return self.docs[:0], self.counts[:0]
        part = slice(int(self.starts[place]), int(self.starts[place + 1]))
        return self.docs[part], self.counts[part]


def _saturated(counts: NDArray[np.uint8], relative_lengths: NDArray[np.float32]) -> NDArray[np.float32]:
    number = counts.astype(np.float32)
    saturated = number * (K1 + 1) / (number + K1 * (1 - B + B * relative_lengths))
    return saturated.astype(np.float32)
