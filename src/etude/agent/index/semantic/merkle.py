"""A Merkle tree over files and directories: where two states differ, without looking at all of both.

A file's digest is BLAKE3 of its bytes; a directory's is BLAKE3 of its entries' names, kinds and digests in
order. Two directories with one digest hold the same, whatever else the trees they lie in hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

__all__ = ["Changes", "MerkleTree"]


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths of files, in order."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def num(self) -> int:
        return len(self.added) + len(self.changed) + len(self.removed)


@dataclass(slots=True)
class _Directory:
    entries: dict[str, _Directory | bytes] = field(default_factory=dict)
    digest: bytes = b""

    def seal(self) -> bytes:
        hasher = blake3()
        for name in sorted(self.entries):
            entry = self.entries[name]
            kind, digest = (b"d", entry.seal()) if isinstance(entry, _Directory) else (b"f", entry)
            encoded = name.encode("utf-8", "surrogateescape")
            hasher.update(kind + len(encoded).to_bytes(4, "little") + encoded + digest)
        self.digest = hasher.digest()
        return self.digest


class MerkleTree:
    """Immutable. `files`: path (with "/") -> digest of its content.

    Raises `ValueError` if a path is both a file and a directory.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._root = _Directory()
        for path, digest in files.items():
            *folders, name = path.split("/")
            place = self._root
            for folder in folders:
                below = place.entries.setdefault(folder, _Directory())
                if not isinstance(below, _Directory):
                    raise ValueError(f"{path}: {folder} is a file")
                place = below
            if name in place.entries:
                raise ValueError(f"{path} is there twice")
            place.entries[name] = digest
        self._root.seal()

    @property
    def root(self) -> bytes:
        """32 bytes that name the whole state."""
        return self._root.digest

    def digest(self, path: str) -> bytes | None:
        """Of a file or directory; "" is the root; None if there is none."""
        place: _Directory | bytes = self._root
        for name in path.split("/") if path else []:
            if not isinstance(place, _Directory) or name not in place.entries:
                return None
            place = place.entries[name]
        return place.digest if isinstance(place, _Directory) else place

    def changes_since(self, older: MerkleTree) -> Changes:
        """What happened between `older` and this state. Directories with equal digests are not entered."""
        added: list[str] = []
        changed: list[str] = []
        removed: list[str] = []
        for path, old, new in _differences(older._root, self._root, ""):
            if old and new:
                changed.append(path)
            else:
                (added if new else removed).append(path)
        return Changes(tuple(sorted(added)), tuple(sorted(changed)), tuple(sorted(removed)))


_Entry = _Directory | bytes | None


def _differences(old: _Entry, new: _Entry, path: str) -> Iterator[tuple[str, bool, bool]]:
    """(path, was there, is there) of files that differ."""
    if isinstance(old, _Directory) and isinstance(new, _Directory) and old.digest == new.digest:
        return
    if isinstance(old, _Directory) or isinstance(new, _Directory):
        before = old.entries if isinstance(old, _Directory) else {}
        after = new.entries if isinstance(new, _Directory) else {}
        for name in before.keys() | after.keys():
            yield from _differences(before.get(name), after.get(name), f"{path}/{name}" if path else name)
    is_old, is_new = isinstance(old, bytes), isinstance(new, bytes)
    if (is_old or is_new) and old != new:
        yield path, is_old, is_new
