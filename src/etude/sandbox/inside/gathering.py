"""Changes of a sandbox in the whole root of an image, and archives of its files.

For grading: first the changed names (`changed`), then the contents of those that count (`pack`); and links
and executable bits of the workspace (`kinds`). No program that the agent could have replaced takes part.

The paths that may differ come from the layers that the sandbox wrote to or, where the engine hides those,
from an index that was made before anything ran.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import json
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etude.sandbox.inside import faults
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.filesystem import MAX_ENTRIES
from etude.sandbox.inside.packing import (
    DIRECTORY_FLAGS,
    FILE_FLAGS,
    OPAQUE,
    Folder,
    add_entry,
    attributes,
    walk_tree,
)

GUEST_DIRECTORY = "var/lib/etude"
"""Directory of the guest's own files."""
NO_FILES = ("dev", "proc", "sys")
"""Directories of the root without files of the image."""
_NAMES_BYTES = 16 << 20


@dataclass(frozen=True)
class Skipped:
    """The parts of the root that are not searched, and do not count against limits."""

    tops: frozenset[str] = frozenset()
    """Top-level names."""
    names: frozenset[str] = frozenset()
    """Names in any directory."""
    hidden: bool = False
    """Whether all names that begin with a dot are skipped, except `.ssh`."""

    def skips(self, path: str, name: str) -> bool:
        """Whether an entry is skipped, given that its directory is not."""
        is_hidden = self.hidden and name.startswith(".") and name != ".ssh"
        return is_hidden or name in self.names or path in self.tops

    def covers(self, path: str) -> bool:
        """Whether an entry or one of its parent directories is skipped."""
        names = path.split("/")
        return names[0] in self.tops or any(self.skips("", name) for name in names)


_NOTHING = Skipped()


class OriginalRoot(Protocol):
    """The image's root before anything ran."""

    def candidates(self, skipped: Skipped) -> Iterator[str]:
        """Paths below `/` that may have changed since, perhaps with duplicates."""
        ...

    def existed(self, path: str) -> bool:
        """Whether the path existed."""
        ...

    def is_unchanged(self, path: str, status: os.stat_result) -> bool:
        """Whether the path is the same as before; `status`: of the path now."""
        ...


class LayeredRoot:
    """A root of overlaid layers: its candidates are in the layers that the sandbox wrote to."""

    def __init__(self, base: int, written: Sequence[int]) -> None:
        """`base`: the image's own root, `written`: the layers above it, all as directories."""
        self._base = base
        self._written = written

    def candidates(self, skipped: Skipped) -> Iterator[str]:
        for layer in self._written:
            hidden: set[str] = set()
            for folder, name, status in walk(layer, skipped=skipped):
                path = folder.prefix + name
                yield path
                if stat.S_ISDIR(status.st_mode) and (
                    folder.prefix in hidden or _is_opaque(name, folder.descriptor)
                ):
                    hidden.add(f"{path}/")
                    yield from (f"{path}/{below}" for below in self._names(path))
        if "tmp" in skipped.tops:
            return
        top = os.open("/tmp", DIRECTORY_FLAGS)
        try:
            yield from (
                f"tmp/{folder.prefix}{name}" for folder, name, _ in walk(top, is_root=False, skipped=skipped)
            )
        finally:
            os.close(top)

    def existed(self, path: str) -> bool:
        return not path.startswith("tmp/") and self._status(path) is not None

    def is_unchanged(self, path: str, status: os.stat_result) -> bool:
        before = None if path.startswith("tmp/") else self._status(path)
        if before is None or before.st_mode != status.st_mode:
            return False
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(path, dir_fd=self._base) == os.readlink(f"/{path}")
        return not stat.S_ISREG(status.st_mode) or (
            before.st_size == status.st_size and self._has_same_bytes(path)
        )

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=self._base, follow_symlinks=False)
        except OSError:
            return None

    def _has_same_bytes(self, path: str) -> bool:
        """Whether a file has the same content; False if it is unreadable."""
        try:
            with (
                open(os.open(path, FILE_FLAGS, dir_fd=self._base), "rb") as before,
                open(os.open(f"/{path}", FILE_FLAGS), "rb") as now,
            ):
                while (piece := before.read(1 << 20)) == now.read(1 << 20):
                    if not piece:
                        return True
        except OSError:
            pass
        return False

    def _names(self, path: str) -> list[str]:
        try:
            descriptor = os.open(path, DIRECTORY_FLAGS, dir_fd=self._base)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)


class IndexedRoot:
    """A root with an index file: kind, rights, size and time of each path."""

    def __init__(self, index: str = f"/{GUEST_DIRECTORY}/index.json") -> None:
        self._index = index
        self._rows: dict[str, list[Any]] | None = None

    def make(self) -> None:
        """Writes the index, unless there is one: this root may be a copy that has changed since."""
        if not os.path.exists(self._index):
            rows = {path: _row(status) for path, status in _root_entries()}
            with open(self._index, "w", errors="surrogateescape") as file:
                json.dump(rows, file)

    def candidates(self, skipped: Skipped) -> Iterator[str]:
        seen: set[str] = set()
        for path, status in _root_entries(skipped):
            seen.add(path)
            if not self.is_unchanged(path, status):
                yield path
        yield from (path for path in self._known() if path not in seen and not skipped.covers(path))

    def existed(self, path: str) -> bool:
        return path in self._known()

    def is_unchanged(self, path: str, status: os.stat_result) -> bool:
        return self._known().get(path) == _row(status)

    def _known(self) -> dict[str, list[Any]]:
        if self._rows is None:
            try:
                with open(self._index, errors="surrogateescape") as file:
                    rows = json.load(file)
            except (OSError, ValueError, RecursionError):
                rows = None
            if not isinstance(rows, dict):  # commands may run as root and have replaced it
                raise Fault("diff", f"the record of the image's files, {self._index}, was changed")
            self._rows = rows
        return self._rows


def _root_entries(skipped: Skipped = _NOTHING) -> Iterator[tuple[str, os.stat_result]]:
    top = os.open("/", DIRECTORY_FLAGS)
    try:
        for folder, name, status in walk(top, 1 << 24, skipped=skipped):
            yield folder.prefix + name, status
    finally:
        os.close(top)


def _row(status: os.stat_result) -> list[Any]:
    """The attributes that differ after a change; entries of a directory have rows of their own."""
    if stat.S_ISDIR(status.st_mode):
        return [status.st_mode]
    return [status.st_mode, status.st_size, status.st_mtime_ns]


def walk(
    top: int, max_entries: int = MAX_ENTRIES, is_root: bool = True, skipped: Skipped = _NOTHING
) -> Iterator[tuple[Folder, str, os.stat_result]]:
    """(folder, name, status) of everything below a directory, on its own file system. Follows no links.

    Directories that cannot be entered are skipped; for a whole root (`is_root`) also those without files of
    the image. Raises Fault for more than `max_entries` entries, without those that are skipped.
    """
    passed_over = (*NO_FILES, GUEST_DIRECTORY) if is_root else ()
    device = os.fstat(top).st_dev

    def skips(folder: Folder, name: str) -> bool:
        path = folder.prefix + name
        return path in passed_over or skipped.skips(path, name)

    def enter(folder: Folder, name: str, status: os.stat_result) -> Folder | None:
        with contextlib.suppress(PermissionError):
            return folder.enter(name, status) if status.st_dev == device else None

    entries = walk_tree(Folder(os.dup(top), "", os.fstat(top)), skips, enter)
    with contextlib.closing(entries):
        for count, entry in enumerate(entries, 1):
            if count > max_entries:
                raise Fault(*faults.DIFF_TOO_LARGE)
            yield entry


class ChangeCollector:
    """Answers `changed`, `kinds` and `pack`, for a sandbox without running processes of the agent."""

    def __init__(self, workspace: str, before: OriginalRoot | None = None) -> None:
        """`before` None: the root is not an image's, and cannot change."""
        self._workspace = workspace.strip("/")
        self._top = os.path.realpath(workspace)
        self._before = before

    def changed(self, skipped: Skipped = _NOTHING) -> bytes:
        """NUL-terminated paths below `/`, outside of the workspace: `+` and a changed or new path, `-` and a
        removed one. Raises Fault for too many."""
        rows: list[bytes] = []
        size = 0
        before = self._before
        is_reached = functools.cache(_is_reached)
        for path in sorted(set(before.candidates(skipped))) if before is not None else ():
            if f"{path}/".startswith(f"{self._workspace}/") or not is_reached(os.path.dirname(path)):
                continue
            try:
                status: os.stat_result | None = os.lstat(f"/{path}")
            except OSError:
                status = None
            assert before is not None, "it has candidates"
            sign = b"-" if before.existed(path) else b""
            if status is not None:
                sign = b"" if before.is_unchanged(path, status) else b"+"
            if sign:
                rows.append(sign + os.fsencode(path) + b"\0")
                size += len(rows[-1])
                if size > _NAMES_BYTES or len(rows) > MAX_ENTRIES:
                    raise Fault(*faults.DIFF_TOO_LARGE)
        return b"".join(rows)

    def kinds(self) -> tuple[str, bytes]:
        """The workspace's real path, and NUL-terminated pairs: a link and its target, or an executable file
        and an empty text. Raises Fault for too many."""
        rows: list[bytes] = []
        size = 0
        top = os.open(self._top, DIRECTORY_FLAGS)
        try:
            for folder, name, status in walk(top, is_root=False):
                target = b""
                if stat.S_ISLNK(status.st_mode):
                    target = os.fsencode(os.readlink(name, dir_fd=folder.descriptor))
                elif not (stat.S_ISREG(status.st_mode) and status.st_mode & 0o100):
                    continue
                rows.append(os.fsencode(folder.prefix + name) + b"\0" + target + b"\0")
                size += len(rows[-1])
                if size > _NAMES_BYTES:
                    raise Fault(*faults.DIFF_TOO_LARGE)
        finally:
            os.close(top)
        return self._top, b"".join(rows)

    def pack(self, paths: Sequence[str], below: bool, exclude: Sequence[str], limit_bytes: int) -> bytes:
        """A tar file of files, directories and links, under the given names; missing paths are left out.

        `below`: with everything below directories, except what matches a pattern of `exclude`, as in `tar
        --exclude`; a path that is a link is replaced by its target. Raises Fault for more than `limit_bytes`.
        """
        target = _Bounded(limit_bytes)
        with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for path in paths:
                place = os.path.realpath(path) if below else path
                if place.split("/")[1] in NO_FILES:
                    continue
                _pack_one(archive, path, place)
                if below and os.path.isdir(place):
                    _pack_below(archive, path.rstrip("/"), place, exclude)
        return target.getvalue()


class _Bounded(io.BytesIO):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._limit_bytes:
            raise Fault(*faults.DIFF_TOO_LARGE)
        return super().write(data)


def _is_opaque(name: str, folder: int) -> bool:
    try:
        return OPAQUE in attributes(name, folder)
    except PermissionError:
        return False


def _is_reached(folder: str) -> bool:
    """Whether a directory below `/` is reached without links; otherwise it counts under its real path."""
    return os.path.realpath(f"/{folder}") == f"/{folder}"


def _pack_below(archive: tarfile.TarFile, name: str, place: str, exclude: Sequence[str]) -> None:
    excluded: set[str] = set()
    top = os.open(place, DIRECTORY_FLAGS)
    try:
        for folder, entry, status in walk(top, is_root=False):
            path = folder.prefix + entry
            if folder.prefix in excluded or _is_excluded(path, exclude):
                excluded.add(f"{path}/")
            else:
                _add(archive, f"{name}/{path}", entry, folder.descriptor, status)
    finally:
        os.close(top)


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """As `tar --exclude` of `./path`: a pattern may match from any component on, and `*` matches slashes."""
    names = ["./" + path, path, *(path[place + 1 :] for place, sign in enumerate(path) if sign == "/")]
    return any(fnmatch.fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns for name in names)


def _pack_one(archive: tarfile.TarFile, name: str, place: str) -> None:
    parent, entry = os.path.split(place.rstrip("/") or "/.")
    try:
        folder = os.open(parent, DIRECTORY_FLAGS)
    except OSError:
        return
    try:
        _add(archive, name, entry, folder, os.stat(entry, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return
    finally:
        os.close(folder)


def _add(archive: tarfile.TarFile, name: str, entry: str, folder: int, status: os.stat_result) -> None:
    """Adds one entry, if it is a readable file, a directory or a link."""
    info = tarfile.TarInfo(name.strip("/"))
    info.mode = status.st_mode & (0o3777 if stat.S_ISDIR(status.st_mode) else 0o777)
    info.mtime = int(status.st_mtime)
    with contextlib.suppress(PermissionError):
        add_entry(archive, info, entry, folder, status.st_mode)
