"""One segment of the index: some thousand files, their table and the posting list of each gram.

    segment-ID/
      flags.npy, paths.npy       the files and their `Flags`
      ranks.npy                  rarity of each pair of bytes (see grams.py)
      starts.npy, postings.npy   posting lists, by bucket of grams; mapped, not read

A posting list is the sorted 16-bit numbers of the documents that hold a gram of the bucket or, where that is
shorter, one bit per document; its length tells which of the two it is. Delta coding would be smaller by about
a third, but numbers of fixed width can be used directly from the mapped file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.grep.grams import PairRanks, gram_hashes
from etude.agent.index.grep.literals import Plan
from etude.errors import StoreError

MOST_DOCUMENTS = 1 << 15
_ENOUGH = 2
"""Once so few documents are left, looking up more grams costs more than reading these files."""
_MAPPED_BYTES = 1 << 18
"""Smaller arrays are read: a mapping costs more, and numpy maps no empty array."""


class Flags:
    """Special properties of a document, as bits."""

    NUL = 1
    """It holds a NUL: how much ripgrep searches depends on whether it was named or found in a directory."""
    ODD_FOLD = 2
    """It holds the Kelvin sign or the long s."""
    ALWAYS = 4
    """Its text is not in the index (unreadable, or too large to decode): always a candidate."""


@dataclass(frozen=True, slots=True)
class Document:
    """Record of an indexed file."""

    path: bytes
    flags: int


class Segment:
    """A mapped segment. Read-only; safe to share."""

    def __init__(self, path: Path) -> None:
        """Opens `path`. Raises StoreError for a damaged one."""
        try:
            self._starts, self._postings = _load(path, "starts"), _load(path, "postings")
            self.ranks: PairRanks = _load(path, "ranks")
            self.flags: NDArray[np.uint8] = _load(path, "flags")
            self.paths: list[bytes] = _load(path, "paths").tobytes().split(b"\0")[:-1]
            """Paths of all documents."""
            if self.flags.dtype != np.uint8 or len(self.paths) != len(self.flags):
                raise ValueError("its files do not belong together")
        except (OSError, ValueError, EOFError) as error:
            raise StoreError(
                f"is damaged: {error}", field="index", received=str(path), fix="build the index again"
            ) from error
        self._bits = (len(self._starts) - 1).bit_length() - 1

    def candidates(self, plan: Plan) -> NDArray[np.intp]:
        """Numbers of the documents that may match."""
        found = np.ones(len(self.paths), np.bool_)
        for texts in plan.required:
            found &= functools.reduce(np.logical_or, map(self._literal, texts))
            if np.count_nonzero(found) <= _ENOUGH:
                break
        found |= self.flags & (Flags.ALWAYS | (Flags.ODD_FOLD if plan.odd_folds else 0)) != 0
        return np.flatnonzero(found)

    def _literal(self, text: bytes) -> NDArray[np.bool_]:
        buckets = np.unique(gram_hashes(text, self.ranks) >> np.uint32(32 - self._bits))
        starts, ends = self._starts[buckets], self._starts[buckets + 1]
        found: NDArray[np.bool_] | None = None
        for number in np.argsort(ends - starts, kind="stable").tolist():
            marks = self._marks(int(starts[number]), int(ends[number]))
            found = marks if found is None else found & marks
            if np.count_nonzero(found) <= _ENOUGH:
                break
        assert found is not None  # a literal is never shorter than a gram
        return found

    def _marks(self, start: int, end: int) -> NDArray[np.bool_]:
        postings = self._postings[start:end]
        if end - start == bitmap_words(len(self.paths)):
            bits = np.unpackbits(postings.view(np.uint8), count=len(self.paths), bitorder="little")
            return bits.view(np.bool_)
        marks = np.zeros(len(self.paths), np.bool_)
        marks[postings] = True
        return marks


def _load(path: Path, name: str) -> NDArray[Any]:
    file = path / f"{name}.npy"
    mapped = np.load(file, mmap_mode="r" if file.stat().st_size > _MAPPED_BYTES else None)
    return mapped.view(np.ndarray)


def bitmap_words(num_documents: int) -> int:
    """Length of a posting list of bits, in 16-bit words."""
    return (num_documents + 15) // 16


def write_segment(
    path: Path, documents: Sequence[Document], keys: NDArray[np.uint64], bits: int, ranks: PairRanks
) -> None:
    """Writes a segment into the draft of an index. `keys`: sorted, `bucket << 16 | document`."""
    starts, postings = _pack(keys, bits, len(documents))
    arrays: dict[str, NDArray[Any]] = {
        "starts": starts,
        "postings": postings,
        "ranks": ranks,
        "flags": np.array([d.flags for d in documents], np.uint8),
        "paths": np.frombuffer(b"".join(d.path + b"\0" for d in documents), np.uint8),
    }
    path.mkdir()
    for name, values in arrays.items():
        np.save(path / f"{name}.npy", values, allow_pickle=False)


def _pack(
    keys: NDArray[np.uint64], bits: int, num_documents: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Start of each bucket's list, and all lists; a list that would be longer than a bitmap becomes one."""
    counts = np.bincount((keys >> np.uint64(16)).astype(np.int64), minlength=1 << bits)
    numbers = (keys & np.uint64(0xFFFF)).astype(np.uint16)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    words = bitmap_words(num_documents)
    lengths = np.minimum(counts, words)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
    postings = np.empty(int(starts[-1]), np.uint16)
    as_numbers = np.repeat(counts < words, counts)
    places = np.arange(len(numbers), dtype=np.uint32)
    places += np.repeat(starts[:-1] - first[:-1], counts)  # modulo 2 ** 32, in which the sum is right again
    postings[places[as_numbers]] = numbers[as_numbers]
    for bucket in np.flatnonzero(counts >= words).tolist() if words else []:
        marks = np.zeros(words * 16, np.bool_)
        marks[numbers[first[bucket] : first[bucket + 1]]] = True
        bitmap = np.packbits(marks, bitorder="little").view(np.uint16)
        postings[starts[bucket] : starts[bucket + 1]] = bitmap
    return starts, postings
