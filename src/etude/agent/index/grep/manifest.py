"""What an index consists of: one small file, replaced as a whole, that names all others.

    index/
      manifest.json   hash, then JSON: root, options, segments and their dead documents
      ranks-ID        how rare each pair of bytes is
      tree-ID         the listing's directories, skipped entries and ignore files
      segment-ID      see segment.py

A file that the manifest does not name is a leftover of an indexing that did not finish.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.agent.index.grep.grams import PairRanks
from etude.agent.index.grep.segment import FORMAT, Segment
from etude.agent.index.grep.tree import Tree
from etude.errors import ConfigError, StoreError
from etude.kit.durable import write_bytes

__all__ = [
    "Contents",
    "IndexBusyError",
    "Manifest",
    "SegmentEntry",
    "index_key",
    "new_name",
    "open_contents",
    "read_manifest",
    "writing",
]

_NAME = "manifest.json"
_TRIES = 5
_OURS = re.compile(r"\.?(segment|tree|ranks|manifest)[-.][\w.-]+")
"""Names that may be removed: whoever names a directory with other things in it shall not lose them."""


class IndexBusyError(ConfigError):
    """Another process writes the index just now."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One segment and which of its documents no longer count."""

    name: str
    num_documents: int
    text_bytes: int
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The index as a whole."""

    root: str
    key: str
    """The caller's name for the content (a commit, a template's digest); empty for a directory that lives."""
    hidden: bool
    no_ignore: bool
    scanned_ns: int
    """When the listing began: a file changed about then is read again by the next update."""
    ranks: str
    tree: str
    segments: tuple[SegmentEntry, ...] = field(default=())

    def files(self) -> set[str]:
        """Names of all files that belong to it."""
        return {_NAME, "lock", self.ranks, self.tree, *(entry.name for entry in self.segments)}


@dataclass(frozen=True, slots=True)
class Contents:
    """An opened index: immutable, shared by all searches."""

    manifest: Manifest
    segments: tuple[Segment, ...]
    ranks: PairRanks
    tree_json: bytes

    def tree(self) -> Tree:
        """The stored listing without its files, which stand in the segments."""
        lists = json.loads(self.tree_json)
        parts = [[os.fsencode(path) for path in lists[name]] for name in ("directories", "shadows", "rules")]
        return Tree((), frozenset(parts[0]), tuple(parts[1]), tuple(parts[2]))


def index_key(content: str, *, hidden: bool = False, no_ignore: bool = False) -> str:
    """A name for an index of `content` (a commit, a template's digest) in this format with these options."""
    return xxhash.xxh3_128_hexdigest(json.dumps([content, FORMAT, hidden, no_ignore]).encode())


def new_name(kind: str) -> str:
    """A file name that was never used."""
    return f"{kind}-{uuid.uuid4().hex[:16]}"


def write_tree(path: Path, tree: Tree) -> None:
    """Stores all of a listing but its files, which stand in the segments."""
    lists = {
        name: [os.fsdecode(entry) for entry in entries]
        for name, entries in (
            ("directories", sorted(tree.directories)),
            ("shadows", tree.shadows),
            ("rules", tree.rules),
        )
    }
    _write_checked(path, json.dumps(lists).encode())


def write_ranks(path: Path, ranks: PairRanks) -> None:
    """Stores the ranks."""
    _write_checked(path, ranks.tobytes())


def write_manifest(into: Path, manifest: Manifest) -> None:
    """Makes `manifest` the index's content, then removes what no longer belongs to it."""
    fields: dict[str, Any] = {"format": FORMAT} | {
        name: getattr(manifest, name)
        for name in ("root", "key", "hidden", "no_ignore", "scanned_ns", "ranks", "tree")
    }
    fields["segments"] = [
        [entry.name, entry.num_documents, entry.text_bytes, _marks_text(entry)] for entry in manifest.segments
    ]
    _write_checked(into / _NAME, json.dumps(fields).encode())
    kept = manifest.files()
    for path in into.iterdir():
        if path.name not in kept and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


def read_manifest(into: Path) -> Manifest:
    """Raises StoreError if there is none, or one that is damaged or of another format."""
    path = into / _NAME
    try:
        fields = json.loads(_read_checked(path))
    except FileNotFoundError as error:
        raise StoreError("there is no index", field="index", received=str(into), fix="build one") from error
    if fields.get("format") != FORMAT:
        raise StoreError(
            "is of another format", field="index", received=fields.get("format"), fix="build the index again"
        )
    segments = [
        SegmentEntry(name, count, size, _marked(marks)) for name, count, size, marks in fields["segments"]
    ]
    rest = {name: fields[name] for name in fields if name not in ("format", "segments")}
    return Manifest(**rest, segments=tuple(segments))


def open_contents(into: Path) -> Contents:
    """Opens what the manifest names. Raises StoreError for a missing, torn or foreign index."""
    for attempt in range(_TRIES):
        manifest = read_manifest(into)
        try:
            return Contents(
                manifest,
                tuple(Segment(into / entry.name, _dead(entry)) for entry in manifest.segments),
                np.frombuffer(_read_checked(into / manifest.ranks), np.uint16),
                _read_checked(into / manifest.tree),
            )
        except (FileNotFoundError, StoreError) as error:
            if read_manifest(into) == manifest or attempt == _TRIES - 1:  # else an update came between
                raise StoreError(
                    str(error), field="index", received=str(into), fix="build the index again"
                ) from error
    raise AssertionError("unreachable")


@contextmanager
def writing(into: Path) -> Iterator[None]:
    """The right to change the index, one process at a time. Raises IndexBusyError if another has it."""
    into.mkdir(parents=True, exist_ok=True)
    with (into / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise IndexBusyError(
                "is being written by another process", field="index", received=str(into), fix="wait for it"
            ) from error
        yield


def _dead(entry: SegmentEntry) -> NDArray[np.bool_]:
    dead = np.zeros(entry.num_documents, np.bool_)
    dead[list(entry.dead)] = True
    return dead


def _marks_text(entry: SegmentEntry) -> str:
    return base64.b64encode(np.packbits(_dead(entry)).tobytes()).decode() if entry.dead else ""


def _marked(marks: str) -> tuple[int, ...]:
    bits = np.unpackbits(np.frombuffer(base64.b64decode(marks), np.uint8))
    return tuple(np.flatnonzero(bits).tolist())


def _write_checked(path: Path, content: bytes) -> None:
    write_bytes(path, xxhash.xxh3_128_hexdigest(content).encode() + b"\n" + content)


def _read_checked(path: Path) -> bytes:
    digest, _, content = path.read_bytes().partition(b"\n")
    if xxhash.xxh3_128_hexdigest(content).encode() != digest:
        raise StoreError("is damaged", field="index", received=str(path), fix="build the index again")
    return content
