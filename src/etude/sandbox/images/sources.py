# ruff: noqa: PTH110, PTH115, PTH118, PTH208
"""Where COPY takes files from: a build context on this machine, or the image of another stage.

Names are bytes here, which pathlib does not take.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.ignore import IgnoreRules, has_wildcard, match_part
from etude.sandbox.images.pack import time_of
from etude.sandbox.images.tar import Entry
from etude.sandbox.images.view import Found, ImageView

EPOCH_S = 946684800
"""Time of all files from a context: 2000-01-01, so that checking out a repository again changes no layer.

Not 1970, because zip archives (and so Python wheels) cannot hold times before 1980.
"""
MAX_FILES = 200_000


@dataclass(frozen=True, slots=True)
class Item:
    """One file to copy; `entry.name` is relative to what was selected, empty for that itself."""

    entry: Entry
    path: bytes | None
    """Of its data on this machine."""


@dataclass(frozen=True, slots=True)
class Selected:
    """What one source of a COPY names."""

    name: bytes
    """Its last component, which it keeps when it is copied into a directory."""
    items: tuple[Item, ...]
    """It and all below it, parents first."""

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory, whose contents are copied and not itself."""
        return self.items[0].entry.kind == "dir"


class Source(Protocol):
    """A tree to copy from. Blocks."""

    def select(self, pattern: str) -> list[Selected]:
        """What a path or pattern names, sorted; at least one. Raises TemplateError."""
        ...


class ContextSource:
    """A directory on this machine, less what its .dockerignore names. Nothing outside of it is read."""

    def __init__(self, root: Path, ignore: IgnoreRules | None = None) -> None:
        self._root = os.fsencode(root.resolve())
        self._ignore = ignore or IgnoreRules()

    def select(self, pattern: str) -> list[Selected]:
        parts = _parts(pattern)
        names = (
            list(self._expand(parts))
            if any(map(has_wildcard, parts))
            else [b"/".join(map(os.fsencode, parts))]
        )
        found = [selected for name in names if (selected := self._selected(name)) is not None]
        if not found:
            raise TemplateError(
                "no such file in the build context", received=pattern,
                fix="name a file of the context that its .dockerignore does not leave out",
            )  # fmt: skip
        return found

    def _expand(self, parts: list[str]) -> Iterator[bytes]:
        names = [b""]
        for part in parts:
            names = [
                name + b"/" + entry if name else entry
                for name in names
                for entry in _names(self._path(name))
                if match_part(part, os.fsdecode(entry))
            ]
        return iter(names)

    def _selected(self, name: bytes) -> Selected | None:
        path = os.path.realpath(self._path(name))
        if path != self._root and not path.startswith(self._root.rstrip(b"/") + b"/"):
            raise TemplateError(
                "a link that leads out of the build context",
                received=os.fsdecode(name),
                fix="put the file there",
            )
        if not os.path.exists(path):
            return None
        real = os.path.relpath(path, self._root) if path != self._root else b""
        items = tuple(self._walk(real))
        return Selected(name.rpartition(b"/")[2], items) if items else None

    def _walk(self, top: bytes) -> Iterator[Item]:
        waiting: list[tuple[bytes, Item]] = []
        pending = [top]
        count = 0
        while pending:
            name = pending.pop()
            count += 1
            if count > MAX_FILES:
                raise TemplateError(
                    f"more than {MAX_FILES} files in the build context",
                    fix="leave files out by a .dockerignore",
                )
            ignored = bool(name) and self._ignore.ignores(os.fsdecode(name))
            is_dir = stat.S_ISDIR(os.lstat(self._path(name)).st_mode)
            if ignored and not is_dir:
                continue
            item = self._item(name, top)
            if is_dir and (not ignored or self._ignore.has_exceptions):
                below = reversed(_names(self._path(name)))
                pending += [name + b"/" + part if name else part for part in below]
            # An ignored directory comes along only above a file that an exception takes back in.
            waiting = [row for row in waiting if not row[0] or name.startswith(row[0] + b"/")]
            if ignored:
                waiting.append((name, item))
            else:
                yield from (row[1] for row in waiting)
                waiting = []
                yield item

    def _path(self, name: bytes) -> bytes:
        return os.path.join(self._root, name) if name else self._root

    def _item(self, name: bytes, top: bytes) -> Item:
        path = self._path(name)
        relative = name[len(top) :].lstrip(b"/")
        status = os.lstat(path)
        item = _item(relative, path, status)
        return replace(item, entry=replace(item.entry, mtime_s=EPOCH_S))


class ImageSource:
    """The files of an image, with their times."""

    def __init__(self, view: ImageView) -> None:
        self._view = view

    def select(self, pattern: str) -> list[Selected]:
        parts = _parts(pattern)
        if any(map(has_wildcard, parts)):
            found = list(self._expand(parts))
        else:
            one = self._view.find("/".join(parts))
            found = [one] if one is not None else []
        if not found:
            raise TemplateError("no such file in the image that is copied from", received=pattern)
        name = os.fsencode(parts[-1]) if parts and len(found) == 1 and not has_wildcard(parts[-1]) else None
        return [
            self._selected(one, one.parts[-1] if name is None and one.parts else name or b"") for one in found
        ]

    def _expand(self, parts: list[str]) -> Iterator[Found]:
        places: list[tuple[bytes, ...]] = [()]
        for part in parts:
            places = [
                (*place, name)
                for place in places
                for name in self._view.names(self._view.resolve(os.fsdecode(b"/".join(place))))
                if match_part(part, os.fsdecode(name))
            ]
        for place in places:
            found = self._view.find(os.fsdecode(b"/".join(place)))
            if found is not None:
                yield found

    def _selected(self, top: Found, name: bytes) -> Selected:
        depth = len(top.parts)
        walked = self._view.walk(top.parts)
        items = (_item(b"/".join(one.parts[depth:]), one.path, one.status) for one in walked)
        return Selected(name, tuple(items))


def _parts(pattern: str) -> list[str]:
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise TemplateError("leads out of what is copied from", received=pattern, fix="a path without ..")
    return parts


def _names(path: bytes) -> list[bytes]:
    try:
        return sorted(os.listdir(path))
    except NotADirectoryError:
        return []


def _item(name: bytes, path: bytes, status: os.stat_result) -> Item:
    mode, mtime_s = stat.S_IMODE(status.st_mode), time_of(status)
    if stat.S_ISDIR(status.st_mode):
        return Item(Entry(name, "dir", mode, mtime_s), None)
    if stat.S_ISLNK(status.st_mode):
        return Item(Entry(name, "symlink", 0o777, mtime_s, link=os.readlink(path)), None)
    if not stat.S_ISREG(status.st_mode):
        raise TemplateError(
            "a socket, pipe or device cannot be copied", received=os.fsdecode(path), fix="leave it out"
        )
    return Item(Entry(name, "file", mode, mtime_s, status.st_size), path)
