"""The memory of a stopped guest, out of its QEMU process and into a file that other machines can map.

A guest's memory is a private mapping of a file (its base): pages that it never wrote are the base's and
shared by all machines on the same base, pages that it wrote are QEMU's own. A copy therefore is the base's
data plus the written pages, which the kernel tells apart in `/proc/PID/pagemap`. Pages of zeros stay holes.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.errors import SandboxError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PIECE_BYTES = 1 << 20
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_ZERO_PAGE = bytes(PAGE_BYTES)


@dataclass(frozen=True)
class Mapping:
    """A part of the guest's memory in QEMU's address space."""

    address: int
    size_bytes: int
    offset: int
    """In the guest's memory, and so in its file."""


def make_sparse(path: Path, size_bytes: int) -> None:
    """A new file of zeros that takes no space."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a file, holes staying holes; a file system that can share blocks does. Raises OSError."""
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(writer, os.fstat(reader).st_size)
            for start, end in data_ranges(reader):
                _copy_range(reader, writer, start, end)
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """(start, end) of what is no hole."""
    end, size = 0, os.fstat(descriptor).st_size
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def _copy_range(reader: int, writer: int, start: int, end: int) -> None:
    position = start
    while position < end:
        try:
            count = os.copy_file_range(reader, writer, end - position, position, position)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            count = os.pwrite(writer, os.pread(reader, min(_PIECE_BYTES, end - position), position), position)
        if count == 0:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        position += count


def save_memory(pid: int, base: Path, target: Path) -> None:
    """Writes the memory of the stopped QEMU `pid`, whose base is `base`, into the new file `target`.

    Raises SandboxError if its memory cannot be read, OSError if `target` cannot be written.
    """
    copy_sparse(base, target)
    writer = os.open(target, os.O_RDWR | os.O_CLOEXEC)
    try:
        holes = _Holes(writer)
        try:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(pid, error) from error
        try:
            for mapping in find_mappings(pid, base):
                for start, end in written_ranges(pid, mapping):
                    _copy_pages(memory, mapping, start, end, writer, holes)
        finally:
            os.close(memory)
    finally:
        os.close(writer)


def find_mappings(pid: int, base: Path) -> list[Mapping]:
    """Where QEMU has the guest's memory. Raises SandboxError if it has it nowhere."""
    status = base.stat()
    found: list[Mapping] = []
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise _unreadable(pid, error) from error
    for line in lines:
        fields = line.split(maxsplit=5)
        major, _, minor = fields[3].partition(":")
        device = os.makedev(int(major, 16), int(minor, 16))
        if (device, int(fields[4])) == (status.st_dev, status.st_ino):
            start, _, end = fields[0].partition("-")
            found.append(Mapping(int(start, 16), int(end, 16) - int(start, 16), int(fields[2], 16)))
    if sum(mapping.size_bytes for mapping in found) != status.st_size:
        raise SandboxError("the guest's memory is not mapped whole", field="sandbox", received=pid)
    return found


def written_ranges(pid: int, mapping: Mapping) -> Iterator[tuple[int, int]]:
    """(start, end) of written pages, in bytes from the mapping's start."""
    count = mapping.size_bytes // PAGE_BYTES
    entries = array("Q")
    try:
        with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as file:
            file.seek(mapping.address // PAGE_BYTES * 8)
            data = b""
            while len(data) < count * 8 and (piece := file.read(count * 8 - len(data))):
                data += piece
            entries.frombytes(data)
    except OSError as error:
        raise _unreadable(pid, error) from error
    first = -1
    for index, entry in enumerate(entries):
        written = entry & _SWAPPED or (entry & (_PRESENT | _OF_FILE)) == _PRESENT
        if written and first < 0:
            first = index
        elif not written and first >= 0:
            yield first * PAGE_BYTES, index * PAGE_BYTES
            first = -1
    if first >= 0:
        yield first * PAGE_BYTES, len(entries) * PAGE_BYTES


class _Holes:
    """Which pages of the target hold nothing yet: zeros need not be written there."""

    def __init__(self, descriptor: int) -> None:
        self._ranges = list(data_ranges(descriptor))
        self._index = 0

    def at(self, offset: int) -> bool:
        """Whether the page at `offset` is a hole. Offsets of successive calls do not decrease."""
        while self._index < len(self._ranges) and self._ranges[self._index][1] <= offset:
            self._index += 1
        return self._index == len(self._ranges) or offset + PAGE_BYTES <= self._ranges[self._index][0]


def _copy_pages(memory: int, mapping: Mapping, start: int, end: int, writer: int, holes: _Holes) -> None:
    for piece_start in range(start, end, _PIECE_BYTES):
        wanted = min(_PIECE_BYTES, end - piece_start)
        try:
            data = os.pread(memory, wanted, mapping.address + piece_start)
        except OSError as error:
            raise SandboxError(f"the guest's memory cannot be read: {error}", field="sandbox") from error
        if len(data) != wanted:
            raise SandboxError("the guest's memory ended early", field="sandbox")
        offset = mapping.offset + piece_start
        run = 0
        for position in range(0, wanted, PAGE_BYTES):
            if data[position : position + PAGE_BYTES] == _ZERO_PAGE and holes.at(offset + position):
                _write(writer, data[run:position], offset + run)
                run = position + PAGE_BYTES
        _write(writer, data[run:], offset + run)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _unreadable(pid: int, error: OSError) -> SandboxError:
    return SandboxError(
        f"the memory of QEMU cannot be read: {error.strerror}",
        field="sandbox",
        received=pid,
        fix="allow it: sysctl kernel.yama.ptrace_scope must be 0 or 1",
    )
