# ruff: noqa: PTH115, PTH118, PTH208
"""A stack of extracted layers seen as one file system, without mounting it.

What COPY needs to know before it makes a layer: where a path leads (links are followed inside the image,
never outside), what lies there, and what a directory of another stage holds.

Names are bytes here, which pathlib does not take.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.extract import is_opaque, is_whiteout

MAX_LINKS = 40

Parts = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A file of the image."""

    parts: Parts
    """Where it lies, links resolved (but for the last component, where links were not to be followed)."""
    path: bytes
    """Where its data lies on this machine."""
    status: os.stat_result

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return stat.S_ISDIR(self.status.st_mode)


class ImageView:
    """Looks names up in layers, lowest first. Blocks; the layers must stay."""

    def __init__(self, layers: Sequence[Path]) -> None:
        self._layers = [os.fsencode(layer) for layer in reversed(layers)]

    def find(self, path: str, follow: bool = True) -> Found | None:
        """What lies at an absolute path, None for nothing. Raises TemplateError for circular links."""
        parts = self.resolve(path, follow)
        return self.look(parts)

    def resolve(self, path: str, follow: bool = True) -> Parts:
        """The path without links; what does not exist stays as it is written."""
        pending = [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")][::-1]
        done: list[bytes] = []
        num_links = 0
        while pending:
            part = pending.pop()
            if part == b"..":
                del done[-1:]
                continue
            done.append(part)
            found = self.look(tuple(done)) if pending or follow else None
            if found is None or not stat.S_ISLNK(found.status.st_mode):
                continue
            num_links += 1
            if num_links > MAX_LINKS:
                raise TemplateError("too many symbolic links", field="image", received=path)
            target = os.readlink(found.path)
            done = [] if target.startswith(b"/") else done[:-1]
            pending += [piece for piece in target.split(b"/") if piece not in (b"", b".")][::-1]
        return tuple(done)

    def look(self, parts: Parts) -> Found | None:
        """What lies at a path whose directories are no links."""
        layers = self._visible(parts[:-1])
        for layer in layers:
            path = os.path.join(layer, *parts)
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            return None if is_whiteout(status) else Found(parts, path, status)
        return None

    def names(self, parts: Parts) -> list[bytes]:
        """Sorted names in a directory; empty if it is none."""
        names: set[bytes] = set()
        hidden: set[bytes] = set()
        for layer in self._visible(parts):
            folder = os.path.join(layer, *parts)
            here = set(os.listdir(folder)) - hidden
            gone = {name for name in here if is_whiteout(os.lstat(os.path.join(folder, name)))}
            names |= here - gone
            hidden |= here
        return sorted(names)

    def walk(self, parts: Parts) -> Iterator[Found]:
        """All that lies at and below a path, parents first, names sorted; links are not followed."""
        pending = [parts]
        while pending:
            found = self.look(pending.pop())
            if found is None:
                continue
            yield found
            if found.is_dir:
                pending += [(*found.parts, name) for name in reversed(self.names(found.parts))]

    def _visible(self, parts: Parts) -> list[bytes]:
        """Layers whose directory `parts` can be seen from above, highest first."""
        layers = list(self._layers)
        for depth in range(len(parts) + 1):
            kept: list[bytes] = []
            for layer in layers:
                path = os.path.join(layer, *parts[:depth])
                try:
                    status = os.lstat(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    break  # a file, a link or a whiteout covers what lies below
                kept.append(layer)
                if is_opaque(path):
                    break
            layers = kept
        return layers
