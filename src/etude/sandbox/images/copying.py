"""COPY and WORKDIR as layers, made directly: no sandbox is started for them.

The archive is sorted and its times are fixed, so equal files over an equal image give an equal layer; that
is the cache.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import replace

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.extract import WHITEOUT_PREFIX
from etude.sandbox.images.pack import open_data, time_of
from etude.sandbox.images.sources import EPOCH_S, Selected
from etude.sandbox.images.tar import Entry, TarWriter, Writable
from etude.sandbox.images.view import Found, ImageView, Parts


class LayerPlan:
    """Files to lay over an image; the directories above them come along as they are."""

    def __init__(self, view: ImageView) -> None:
        self._view = view
        self._files: dict[Parts, tuple[Entry, bytes | None]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change."""
        return not self._files

    def make_directory(self, path: str) -> None:
        """Plans a directory and all above it, where they are missing; links are followed."""
        parts = self._view.resolve(path)
        if self._directory(parts) is None:
            self._place(parts, Entry(b"", "dir", 0o755, EPOCH_S), None)

    def copy(self, selected: Sequence[Selected], target: str, mode: int | None) -> None:
        """Plans copies to the absolute path `target`, which is a directory if it ends with a slash.

        `mode` replaces the modes of files and directories. Raises TemplateError.
        """
        there = self._view.find(target)
        if len(selected) > 1 and not target.endswith("/"):
            raise TemplateError("several files need a target that ends with /", received=target)
        into = target.endswith("/") or (there is not None and there.is_dir)
        for source in selected:
            if source.is_dir or into:
                parts = self._view.resolve(target)
            else:
                parts = self._view.resolve(target, follow=False)
            if not source.is_dir and into:
                parts = (*parts, source.name)
            self._copy_tree(source, parts, mode)

    def write(self, target: Writable) -> None:
        """Writes the layer's archive. Blocks. Raises TemplateError for files that change meanwhile."""
        writer = TarWriter(target)
        for parts in sorted(self._files):
            entry, path = self._files[parts]
            entry = replace(entry, name=b"/".join(parts) + (b"/" if entry.kind == "dir" else b""))
            if path is None:
                writer.add(entry)
                continue
            with open_data(path) as data:
                writer.add(entry, data)
                if data.read(1):
                    raise TemplateError("changed while it was read", received=os.fsdecode(path))
        writer.close()

    def _copy_tree(self, source: Selected, top: Parts, mode: int | None) -> None:
        places: dict[bytes, Parts] = {}
        for item in source.items:
            name, entry = item.entry.name, item.entry
            folder, _, last = name.rpartition(b"/")
            parts = (*places[folder], last) if name else top
            if entry.kind == "dir":
                # A directory that the image reaches by a link (/bin) is filled, not replaced.
                parts = self._view.resolve(os.fsdecode(b"/" + b"/".join(parts)))
                places[name] = parts
                if self._directory(parts) is not None:
                    continue
            if mode is not None and entry.kind != "symlink":
                entry = replace(entry, mode=mode)
            self._place(parts, entry, item.path)

    def _directory(self, parts: Parts) -> Entry | None:
        """The directory that will be there, None if there is nothing. Raises TemplateError for a file."""
        planned = self._files.get(parts)
        if planned is not None and planned[0].kind == "dir":
            return planned[0]
        found = self._view.look(parts) if planned is None else None
        if planned is not None or (found is not None and not found.is_dir):
            raise _conflict(parts, "a file is where a directory should be")
        return None if found is None else _as_it_is(found)

    def _place(self, parts: Parts, entry: Entry, path: bytes | None) -> None:
        if not parts:
            raise TemplateError("cannot replace the root directory", received="/")
        if any(part.startswith(WHITEOUT_PREFIX) for part in parts):
            raise TemplateError(
                "a name that stands for a deleted file in layers",
                received=os.fsdecode(b"/".join(parts)),
                fix="rename it",
            )
        for depth in range(1, len(parts)):
            above = parts[:depth]
            if above not in self._files:
                known = self._directory(above)
                self._files[above] = (known or Entry(b"", "dir", 0o755, EPOCH_S), None)
            elif self._files[above][0].kind != "dir":
                raise _conflict(above, "a file is where a directory should be")
        if entry.kind != "dir" and self._is_directory(parts):
            raise _conflict(parts, "a directory is where the file should be")
        self._files[parts] = (entry, path)

    def _is_directory(self, parts: Parts) -> bool:
        planned = self._files.get(parts)
        if planned is not None:
            return planned[0].kind == "dir"
        found = self._view.look(parts)
        return found is not None and found.is_dir


def _as_it_is(found: Found) -> Entry:
    return Entry(b"", "dir", stat.S_IMODE(found.status.st_mode), time_of(found.status))


def _conflict(parts: Parts, message: str) -> TemplateError:
    return TemplateError(message, received=os.fsdecode(b"/" + b"/".join(parts)))
