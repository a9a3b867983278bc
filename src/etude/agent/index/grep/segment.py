"""One segment of the index: some thousand files, their table and the posting list of each gram.

On disk: magic, length and hash of a JSON header, header, then the sections that it names. The file is mapped,
not read. A posting list is the sorted 16-bit numbers of the documents that hold a gram of the bucket or,
where that is shorter, one bit per document; which of the two shows by its length. Delta coding would be
smaller by about a third, but numbers of fixed width are usable as they lie on disk, which makes a lookup a
few microseconds.
"""

from __future__ import annotations

import itertools
import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.agent.index.grep.grams import PairRanks, gram_hashes
from etude.agent.index.grep.literals import And, Literal, Or, Plan, Required
from etude.errors import StoreError
from etude.kit.durable import whole_file

__all__ = ["FORMAT", "MOST_DOCUMENTS", "Document", "Flags", "Segment", "write_segment"]

FORMAT = 1
MOST_DOCUMENTS = 1 << 15
_MAGIC = b"ETGREP\0" + bytes([FORMAT])
_ALIGN = 64
_ENOUGH = 2
"""Once so few documents are left, looking up more grams costs more than reading these files."""


class Flags:
    """What is odd about a document, as bits."""

    NUL = 1
    """It holds a NUL: how much of it ripgrep searches depends on how it came to it."""
    ODD_FOLD = 2
    """It holds the Kelvin sign or the long s."""
    ALWAYS = 4
    """Its text is not in the index (unreadable, or too large to decode): always a candidate."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file as it was when it was indexed."""

    path: bytes
    size_bytes: int
    mtime_ns: int
    digest: bytes
    flags: int


class Segment:
    """A mapped segment file. Read-only; safe to share."""

    def __init__(self, path: Path, dead: NDArray[np.bool_] | None = None) -> None:
        """Maps `path`; `dead` marks documents that no longer count. Raises StoreError for a torn or foreign
        file."""
        self.path = path
        header = self._map(path)
        self.num_documents: int = header["num_documents"]
        self.bits: int = header["bits"]
        self.text_bytes: int = header["text_bytes"]
        self._starts = self._section(header, "starts", np.uint32)
        self._postings = self._section(header, "postings", np.uint16)
        self.sizes_bytes = self._section(header, "sizes", np.int64)
        self.mtimes_ns = self._section(header, "mtimes", np.int64)
        self.flags = self._section(header, "flags", np.uint8)
        self._digests = self._section(header, "digests", np.uint8)
        self._path_starts = self._section(header, "path_starts", np.uint32)
        self._paths = self._section(header, "paths", np.uint8)
        self.alive = np.ones(self.num_documents, np.bool_) if dead is None else ~dead
        self._always = self.alive & (self.flags & Flags.ALWAYS != 0)
        self._odd = self.alive & (self.flags & Flags.ODD_FOLD != 0)

    def _map(self, path: Path) -> dict[str, Any]:
        try:
            with path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _damaged(path, f"cannot be mapped: {error}") from error
        fixed = len(_MAGIC) + 12
        if self._mapped[: len(_MAGIC)] != _MAGIC:
            raise _damaged(path, "is not a segment of this format")
        length = int.from_bytes(self._mapped[len(_MAGIC) : len(_MAGIC) + 4], "little")
        header = self._mapped[fixed : fixed + length]
        if xxhash.xxh3_64_digest(header) != self._mapped[len(_MAGIC) + 4 : fixed]:
            raise _damaged(path, "has a damaged header")
        fields = json.loads(header)
        if fields["file_bytes"] != len(self._mapped):
            raise _damaged(path, "is cut short")
        return fields

    def _section(self, header: dict[str, Any], name: str, kind: type[np.generic]) -> NDArray[Any]:
        start, length, digest = header["sections"][name]
        if name not in ("starts", "postings"):
            self._check(name, start, length, digest)
        return np.frombuffer(self._mapped, kind, length // np.dtype(kind).itemsize, start)

    def _check(self, name: str, start: int, length: int, digest: str) -> None:
        if xxhash.xxh3_64_hexdigest(memoryview(self._mapped)[start : start + length]) != digest:
            raise _damaged(self.path, f"has a damaged section {name}")

    def verify(self) -> None:
        """Reads everything. Raises StoreError if a byte is not what was written."""
        header = self._map(self.path)
        for name, (start, length, digest) in header["sections"].items():
            self._check(name, start, length, digest)

    def document_path(self, number: int) -> bytes:
        """Relative to the root."""
        start, end = self._path_starts[number : number + 2].tolist()
        return self._paths[start:end].tobytes()

    def document(self, number: int) -> Document:
        """The whole record of one document."""
        return Document(
            self.document_path(number),
            int(self.sizes_bytes[number]),
            int(self.mtimes_ns[number]),
            self._digests[16 * number : 16 * number + 16].tobytes(),
            int(self.flags[number]),
        )

    def paths(self) -> list[bytes]:
        """Of all documents, dead ones too."""
        blob, ends = self._paths.tobytes(), self._path_starts.tolist()
        return [blob[start:end] for start, end in itertools.pairwise(ends)]

    def candidates(self, plan: Plan, ranks: PairRanks) -> NDArray[np.intp]:
        """Numbers of the living documents that may match."""
        found = self._evaluate(plan.required, ranks)
        if found is None:
            return np.flatnonzero(self.alive)
        found |= self._always
        if plan.odd_folds:
            found |= self._odd
        found &= self.alive
        return np.flatnonzero(found)

    def _evaluate(self, required: Required, ranks: PairRanks) -> NDArray[np.bool_] | None:
        """A mark for each document; None for all of them."""
        match required:
            case Literal(text):
                return self._literal(text, ranks)
            case And(parts):
                found: NDArray[np.bool_] | None = None
                for part in parts:
                    marks = self._evaluate(part, ranks)
                    found = marks if found is None else found if marks is None else found & marks
                    if found is not None and np.count_nonzero(found) <= _ENOUGH:
                        break
                return found
            case Or(parts):
                found = np.zeros(self.num_documents, np.bool_)
                for part in parts:
                    marks = self._evaluate(part, ranks)
                    if marks is None:
                        return None
                    found |= marks
                return found

    def _literal(self, text: bytes, ranks: PairRanks) -> NDArray[np.bool_]:
        buckets = np.unique(gram_hashes(text, ranks) >> np.uint32(32 - self.bits))
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
        if end - start == bitmap_words(self.num_documents):
            bits = np.unpackbits(postings.view(np.uint8), count=self.num_documents, bitorder="little")
            return bits.view(np.bool_)
        marks = np.zeros(self.num_documents, np.bool_)
        marks[postings] = True
        return marks


def bitmap_words(num_documents: int) -> int:
    """Length of a posting list of bits, in 16-bit words."""
    return (num_documents + 15) // 16


def write_segment(
    path: Path, documents: Sequence[Document], keys: NDArray[np.uint64], bits: int, text_bytes: int
) -> None:
    """Writes a segment whole or not at all. `keys`: sorted, `bucket << 16 | document`."""
    starts, postings = _pack(keys, bits, len(documents))
    paths = b"".join(document.path for document in documents)
    lengths = [0, *(len(document.path) for document in documents)]
    sections: dict[str, NDArray[Any]] = {
        "starts": starts,
        "postings": postings,
        "sizes": np.array([document.size_bytes for document in documents], np.int64),
        "mtimes": np.array([document.mtime_ns for document in documents], np.int64),
        "flags": np.array([document.flags for document in documents], np.uint8),
        "digests": np.frombuffer(b"".join(document.digest for document in documents), np.uint8),
        "path_starts": np.cumsum(lengths).astype(np.uint32),
        "paths": np.frombuffer(paths, np.uint8),
    }
    with whole_file(path) as file:
        file.writelines(_assemble(sections, len(documents), bits, text_bytes))


def _pack(
    keys: NDArray[np.uint64], bits: int, num_documents: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Start of each bucket's list and all lists; lists that would be longer than one bit per document become
    that."""
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


def _assemble(
    sections: dict[str, NDArray[Any]], num_documents: int, bits: int, text_bytes: int
) -> list[bytes]:
    places: dict[str, tuple[int, int, str]] = dict.fromkeys(sections, (0, 0, "0" * 16))
    header: dict[str, Any] = {
        "num_documents": num_documents,
        "bits": bits,
        "text_bytes": text_bytes,
        "file_bytes": 0,
    }
    room = -(-(len(json.dumps({**header, "sections": places})) + 40 * len(sections) + 64) // _ALIGN) * _ALIGN
    at = len(_MAGIC) + 12 + room
    at += -at % _ALIGN
    pieces: list[bytes] = []
    for name, values in sections.items():
        piece = values.tobytes()
        places[name] = (at, len(piece), xxhash.xxh3_64_hexdigest(piece))
        padding = -len(piece) % _ALIGN
        pieces.append(piece + bytes(padding))
        at += len(piece) + padding
    text = json.dumps({**header, "file_bytes": at, "sections": places}).encode().ljust(room)
    begin = _MAGIC + len(text).to_bytes(4, "little") + xxhash.xxh3_64_digest(text) + text
    return [begin + bytes(-len(begin) % _ALIGN), *pieces]


def _damaged(path: Path, problem: str) -> StoreError:
    return StoreError(problem, field="index", received=str(path), fix="build the index again")
