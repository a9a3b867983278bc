# ruff: noqa: PTH115, PTH118, PTH208
"""A layer's directory as the archive that OCI wants: whiteouts as `.wh.` files, sorted, owner 0.

Equal directories (names, modes, times in seconds, contents, links) give equal bytes, on any machine.

Names are bytes here, which pathlib does not take.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.extract import OPAQUE_MARKER, WHITEOUT_PREFIX, is_opaque, is_whiteout
from etude.sandbox.images.tar import MAX_MTIME_S, Entry, TarWriter, Writable

Packed = tuple[Entry, bytes | None]
"""An entry and the path of its data."""


def pack_directory(root: bytes, target: Writable) -> None:
    """Writes the layer that lies in `root` as an archive. Blocks. Raises TemplateError, OSError."""
    writer = TarWriter(target)
    for entry, path in walk(root):
        if path is None:
            writer.add(entry)
        else:
            with open_data(path) as data:
                writer.add(entry, data)
    writer.close()


def walk(root: bytes) -> Iterator[Packed]:
    """Entries of a layer's directory, parents first, each directory's names sorted."""
    seen: dict[tuple[int, int], bytes] = {}
    pending: list[tuple[bytes, bytes]] = [(b"", root)]
    while pending:
        name, path = pending.pop()
        status = os.lstat(path)
        if name.rpartition(b"/")[2].startswith(WHITEOUT_PREFIX):
            raise foreign(name, "a name that only whiteouts may have")
        yield from _entries(name, path, status, seen)
        if stat.S_ISDIR(status.st_mode):
            below = sorted(os.listdir(path), reverse=True)
            pending += [(name + b"/" + part if name else part, os.path.join(path, part)) for part in below]


def _entries(
    name: bytes, path: bytes, status: os.stat_result, seen: dict[tuple[int, int], bytes]
) -> Iterator[Packed]:
    mode, mtime_s = stat.S_IMODE(status.st_mode), time_of(status)
    if stat.S_ISDIR(status.st_mode):
        yield Entry(name + b"/" if name else b"./", "dir", mode, mtime_s), None
        if is_opaque(path):
            yield Entry(name + b"/" + OPAQUE_MARKER if name else OPAQUE_MARKER, "file", 0o600), None
    elif stat.S_ISLNK(status.st_mode):
        yield Entry(name, "symlink", 0o777, mtime_s, link=os.readlink(path)), None
    elif is_whiteout(status):
        folder, slash, last = name.rpartition(b"/")
        yield Entry(folder + slash + WHITEOUT_PREFIX + last, "file", 0o600), None
    elif not stat.S_ISREG(status.st_mode):
        raise foreign(name, "a device, socket or pipe")
    else:
        identity = (status.st_dev, status.st_ino)
        first = seen.get(identity) if status.st_nlink > 1 else None
        if first is not None:
            yield Entry(name, "hardlink", mode, mtime_s, link=first), None
            return
        if status.st_nlink > 1:
            seen[identity] = name
        yield Entry(name, "file", mode, mtime_s, status.st_size), path


def open_data(path: bytes) -> BinaryIO:
    """Opens a regular file that may have been replaced meanwhile: never through a link, never a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb")


def time_of(status: os.stat_result) -> int:
    """Modification time in whole seconds, as an archive holds it."""
    return min(max(status.st_mtime_ns // 10**9, 0), MAX_MTIME_S)


def foreign(name: bytes, what: str) -> TemplateError:
    """The error for a file that no layer holds."""
    return TemplateError(f"the layer holds {what}", field="layer", received=name.decode(errors="replace"))
