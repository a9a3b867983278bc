"""Files of guest memory: sparse, copied without their holes, and diffs laid over a base.

A diff snapshot's memory file is as long as the memory; pages that did not change are holes in it. Laying
it over the previous file gives the whole: data ranges, zeros among them, replace what was there.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from etude.sandbox.errors import SnapshotError

_FICLONE = 0x40049409
_PIECE_BYTES = 8 << 20


def data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """(start, end) of what a file holds between its holes, in order."""
    position, size = 0, os.fstat(descriptor).st_size
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        yield start, position


def copy_sparse(source: Path, target: Path) -> int:
    """A copy that shares its blocks where the file system can, else one without the holes.

    Returns the bytes that were really copied. Raises OSError; then the target is gone.
    """
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.ioctl(writer, _FICLONE, reader)
                return 0
            except OSError:
                # Another file system, or one without shared blocks.
                os.ftruncate(writer, os.fstat(reader).st_size)
                return _copy_data(reader, writer)
        except BaseException:
            target.unlink()
            raise
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def merge_diff(base: Path, diff: Path) -> int:
    """Lays a diff over a base, in place; returns the bytes laid. Raises SnapshotError if they do not fit."""
    reader = os.open(diff, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(base, os.O_RDWR | os.O_CLOEXEC)
        try:
            sizes = os.fstat(writer).st_size, os.fstat(reader).st_size
            if sizes[0] != sizes[1]:
                raise SnapshotError(
                    f"a diff of {sizes[1]} bytes does not fit a base of {sizes[0]}",
                    field="snapshot.memory",
                    received=diff.name,
                    fix="take a full snapshot",
                )
            return _copy_data(reader, writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def link_or_copy(source: Path, target: Path) -> None:
    """Another name for a file that nobody changes; a copy where names cannot be shared. Raises OSError."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        copy_sparse(source, target)
        target.chmod(0o444)


def _copy_data(reader: int, writer: int) -> int:
    total = 0
    for start, end in data_ranges(reader):
        position = start
        while position < end:
            piece = os.pread(reader, min(_PIECE_BYTES, end - position), position)
            if not piece:
                break
            os.pwrite(writer, piece, position)
            position += len(piece)
        total += position - start
    return total
