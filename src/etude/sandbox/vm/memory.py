"""The memory of a stopped guest, out of its QEMU process and into a file that other machines can map.

A guest's memory is a private mapping of a file (its base): pages that it never wrote are the base's and
shared by all machines on the same base, pages that it wrote are QEMU's own. A copy therefore is the base's
data plus the written pages, which the kernel tells apart in `/proc/PID/pagemap`. Pages of zeros stay holes.
"""

from __future__ import annotations

import errno
import os
import subprocess
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
    make_sparse(target, 0)
    done = subprocess.run(
        ["cp", "--sparse=always", "--reflink=auto", source, target],
        capture_output=True,
        text=True,
        check=False,
        restore_signals=False,  # a limit on file sizes is an error here, and no signal that ends it
    )
    if done.returncode:
        raise OSError(errno.EIO, done.stderr.strip()[-500:] or f"cp ended with {done.returncode}")


def save_memory(pid: int, base: Path, target: Path) -> None:
    """Writes the memory of the stopped QEMU `pid`, whose base is `base`, into the new file `target`.

    Raises SandboxError if its memory cannot be read, OSError if `target` cannot be written.
    """
    copy_sparse(base, target)
    writer = os.open(target, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(pid, error) from error
        try:
            for mapping in find_mappings(pid, base):
                for start, end in written_ranges(pid, mapping):
                    _copy_pages(memory, mapping, start, end, writer)
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


def _copy_pages(memory: int, mapping: Mapping, start: int, end: int, writer: int) -> None:
    """Zeros are not written where there are zeros already, which may be a hole."""
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
            page = data[position : position + PAGE_BYTES]
            if page == _ZERO_PAGE == os.pread(writer, PAGE_BYTES, offset + position):
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
