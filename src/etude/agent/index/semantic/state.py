"""What is known of one tree at one time: files, chunks, places of vectors, lexicon.

A state never changes. It is assembled from the state before and the files that differ, and stored as a folder
of arrays that is complete or not there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.index.semantic.lexical import Lexicon, TermCounts
from etude.agent.index.semantic.merkle import MerkleTree
from etude.agent.index.semantic.records import HASH_BYTES, FileRecord
from etude.agent.index.semantic.tree import FileStat
from etude.agent.index.semantic.words import count_terms
from etude.errors import StoreError
from etude.kit.durable import whole_directory

__all__ = ["FileEntry", "TreeState", "assemble", "empty_state", "load_state", "path_terms", "save_state"]

PATH_WEIGHT = 1
"""A word of a file's path counts as so many in each of its chunks."""
STATE_VERSION = 1
NO_ROW = -1
_MAPPED_BYTES = 1 << 18
UNKNOWN = FileStat(-1, -1, -1, -1)
"""Of a file that was written while it was read: equal to no file's."""


@dataclass(frozen=True, eq=False)
class TreeState:
    """Files ordered by path; chunks ordered by file and line."""

    paths: tuple[str, ...]
    digests: NDArray[np.uint8]
    """[files, 32]: BLAKE3 of each content."""
    records: NDArray[np.uint8]
    """[files, 16]: each file's key among the store's records."""
    stats: NDArray[np.int64]
    """[files, 4]: the fields of `FileStat`."""
    starts: NDArray[np.int64]
    """[files + 1]: each file's first chunk."""
    hashes: NDArray[np.uint8]
    """[chunks, 16]: name of each chunk's vector."""
    rows: NDArray[np.int32]
    """[chunks]: row of its vector in the file of generation `generation`, or -1 before it is embedded."""
    lexicon: Lexicon
    generation: int
    scanned: bool
    """Whether all files of the tree are in, embedded or not."""

    @property
    def num_chunks(self) -> int:
        return len(self.rows)

    @cached_property
    def file_of_chunk(self) -> NDArray[np.int32]:
        """[chunks]: index of its file."""
        return np.repeat(np.arange(len(self.paths), dtype=np.int32), np.diff(self.starts))

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Path -> index of the file."""
        return {path: index for index, path in enumerate(self.paths)}

    @cached_property
    def merkle(self) -> MerkleTree:
        return MerkleTree(dict(zip(self.paths, (row.tobytes() for row in self.digests), strict=True)))

    def with_rows(self, rows: NDArray[np.int32], generation: int) -> TreeState:
        """The same chunks with other places of vectors."""
        return replace(self, rows=rows, generation=generation)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a state that is being assembled. `record`: None if it is as in the state before."""

    path: str
    digest: bytes
    record_key: bytes
    stat: FileStat
    record: CutFile | None


@dataclass(frozen=True, slots=True)
class CutFile:
    """What a state needs of a record; far less than the record."""

    hashes: NDArray[np.uint8]
    terms: TermCounts

    @classmethod
    def of(cls, path: str, record: FileRecord) -> CutFile:
        hashes = np.frombuffer(b"".join(record.hashes), np.uint8).reshape(-1, HASH_BYTES)
        return cls(hashes, _with_path(path, record.terms))


def path_terms(path: str) -> dict[int, int]:
    """What a path's words add to each chunk of its file."""
    return count_terms([(path.rpartition(".")[0] or path, PATH_WEIGHT)])


def _with_path(path: str, terms: TermCounts) -> TermCounts:
    words = path_terms(path)
    num = terms.num_docs
    return TermCounts(
        num,
        np.concatenate([terms.docs, np.repeat(np.arange(num, dtype=np.int32), len(words))]),
        np.concatenate([terms.terms, np.tile(np.array(list(words), dtype=np.uint32), num)]),
        np.concatenate([terms.counts, np.tile(np.array(list(words.values()), dtype=np.uint8), num)]),
    )


def empty_state() -> TreeState:
    """Of a tree of which nothing is known."""
    return assemble(None, [], scanned=False)


def assemble(before: TreeState | None, files: Sequence[FileEntry], *, scanned: bool) -> TreeState:
    """The state of `files`; entries without a record are taken over from `before`, which must have them."""
    files = sorted(files, key=lambda entry: entry.path)
    sizes: list[int] = []
    hashes: list[NDArray[np.uint8]] = []
    rows: list[NDArray[np.int32]] = []
    fresh: list[TermCounts] = []
    fresh_numbers: list[NDArray[np.int32]] = []
    numbers = np.full(before.num_chunks if before else 0, -1, dtype=np.int32)
    total = 0
    for entry in files:
        if entry.record is None:
            assert before is not None, "a file without a record needs a state to take it from"
            index = before.index_of[entry.path]
            old = slice(int(before.starts[index]), int(before.starts[index + 1]))
            hashes.append(before.hashes[old])
            rows.append(before.rows[old])
            numbers[old] = np.arange(total, total + old.stop - old.start, dtype=np.int32)
        else:
            hashes.append(entry.record.hashes)
            rows.append(np.full(len(entry.record.hashes), NO_ROW, dtype=np.int32))
            fresh.append(entry.record.terms)
            fresh_numbers.append(np.arange(total, total + len(entry.record.hashes), dtype=np.int32))
        sizes.append(len(rows[-1]))
        total += sizes[-1]
    return TreeState(
        tuple(entry.path for entry in files),
        _table([entry.digest for entry in files], 32),
        _table([entry.record_key for entry in files], HASH_BYTES),
        np.array([entry.stat for entry in files], dtype=np.int64).reshape(-1, 4),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.concatenate(hashes) if hashes else np.zeros((0, HASH_BYTES), np.uint8),
        np.concatenate(rows) if rows else np.zeros(0, np.int32),
        _lexicon(before, numbers, fresh, fresh_numbers, total),
        before.generation if before else 0,
        scanned,
    )


def _lexicon(
    before: TreeState | None,
    numbers: NDArray[np.int32],
    fresh: list[TermCounts],
    fresh_numbers: list[NDArray[np.int32]],
    total: int,
) -> Lexicon:
    """Old postings under their new numbers, and those of fresh files."""
    joined = TermCounts.joined(fresh)
    moved = joined.renumbered(np.concatenate([*fresh_numbers, np.zeros(0, np.int32)]), total)
    if before is None or not before.num_chunks:
        return Lexicon.build(moved)
    kept = before.lexicon.entries().renumbered(numbers, total)
    return Lexicon.build(
        TermCounts(
            total,
            np.concatenate([kept.docs, moved.docs]),
            np.concatenate([kept.terms, moved.terms]),
            np.concatenate([kept.counts, moved.counts]),
        )
    )


def _table(rows: list[bytes], width: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, width)


_ARRAYS = ("digests", "records", "stats", "starts", "hashes", "rows")
_LEXICON = tuple(field.name for field in fields(Lexicon))


def save_state(state: TreeState, into: Path) -> None:
    """Writes a folder that is whole or not there: under another name first, synced, then renamed."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(into) as draft:
        arrays = {name: getattr(state, name) for name in _ARRAYS}
        arrays |= {f"lexicon_{name}": getattr(state.lexicon, name) for name in _LEXICON}
        encoded = [path.encode("utf-8", "surrogateescape") for path in state.paths]
        arrays["paths"] = np.frombuffer(b"\0".join(encoded), np.uint8)
        facts: dict[str, Any] = {
            "version": STATE_VERSION,
            "generation": state.generation,
            "scanned": state.scanned,
        }
        facts["arrays"] = {name: _save(draft / f"{name}.npy", array) for name, array in arrays.items()}
        (draft / "state.json").write_bytes(json.dumps(facts).encode())


def load_state(folder: Path) -> TreeState:
    """What `save_state` wrote, mapped into memory. Raises `StoreError` if a byte of it differs."""
    try:
        facts = json.loads((folder / "state.json").read_bytes())
        if facts["version"] != STATE_VERSION:
            raise StoreError("a state of another version", received=str(folder), fix="delete the store")
        arrays = {name: _load(folder / f"{name}.npy", digest) for name, digest in facts["arrays"].items()}
        joined = arrays.pop("paths").tobytes()
        paths = (
            tuple(part.decode("utf-8", "surrogateescape") for part in joined.split(b"\0")) if joined else ()
        )
        lexicon = Lexicon(**{name: arrays.pop(f"lexicon_{name}") for name in _LEXICON})
        return TreeState(
            paths=paths, lexicon=lexicon, generation=facts["generation"], scanned=facts["scanned"], **arrays
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            "a state in the code index is damaged", received=str(folder), fix="delete the store"
        ) from error


def _save(path: Path, array: NDArray[Any]) -> str:
    np.save(path, np.ascontiguousarray(array), allow_pickle=False)
    return _digest(path)


def _load(path: Path, digest: str) -> NDArray[Any]:
    if _digest(path) != digest:
        raise ValueError(f"{path.name} is not what was written")
    # Small ones are read: a mapping costs more, and numpy maps no empty array.
    return np.load(path, mmap_mode="r" if path.stat().st_size > _MAPPED_BYTES else None, allow_pickle=False)


def _digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()
