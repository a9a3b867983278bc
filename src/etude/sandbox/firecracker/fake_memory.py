"""The memory of the fake's guests: an archive of the guest's files, in pages.

    page 0       magic and the length of the archive
    page 1 ...   the archive
    the rest     zeros, as holes

A restored guest is only whole if every page came back as it was: a diff laid wrongly over its base, or a
page-fault handler that brings the wrong page, breaks the archive.

    python3 -m etude.sandbox.firecracker.fake_memory SOCKET SIZE

prints the archive and stays until its input ends. It does what Firecracker does with the `Uffd` backend: it
registers memory of its own, hands the userfaultfd to the handler at SOCKET, and reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import sys
from pathlib import Path

from etude.sandbox.firecracker.uffd import Region, new_userfaultfd, pack_handshake, register

PAGE_BYTES = 4096
_MAGIC = b"FAKEMEM1"
_HEADER = struct.Struct("<8sQ")


def to_pages(archive: bytes) -> list[bytes]:
    """The pages that are not zero."""
    whole = _HEADER.pack(_MAGIC, len(archive)).ljust(PAGE_BYTES, b"\0") + archive
    whole = whole.ljust(-(-len(whole) // PAGE_BYTES) * PAGE_BYTES, b"\0")
    return [whole[start : start + PAGE_BYTES] for start in range(0, len(whole), PAGE_BYTES)]


def write_memory(path: Path, pages: list[bytes], before: list[bytes] | None, size: int) -> int:
    """Writes a memory file: all pages, or those that differ from `before`; returns how many.

    Pages that were used before and are not any more are written as zeros, as a dirty page would be.
    """
    if len(pages) * PAGE_BYTES > size:
        raise ValueError("the guest's files do not fit its memory")
    known = before or []
    zero = bytes(PAGE_BYTES)
    count = 0
    with path.open("xb") as file:
        file.truncate(size)
        for index in range(max(len(pages), len(known))):
            page = pages[index] if index < len(pages) else zero
            if before is None or page != (known[index] if index < len(known) else zero):
                file.seek(index * PAGE_BYTES)
                file.write(page)
                count += 1
    return count


def read_archive(memory: bytes | mmap.mmap) -> bytes:
    """The archive from memory. Raises ValueError if it is torn."""
    magic, length = _HEADER.unpack(memory[: _HEADER.size])
    if magic != _MAGIC or length + PAGE_BYTES > len(memory):
        raise ValueError("the memory of the guest is torn")
    return bytes(memory[PAGE_BYTES : PAGE_BYTES + length])


def main(arguments: list[str]) -> None:
    """Reads memory through a page-fault handler."""
    path, size = arguments[0], int(arguments[1])
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    uffd = new_userfaultfd()
    register(uffd, address, size)
    half = size // 2 // PAGE_BYTES * PAGE_BYTES
    # Two regions, as Firecracker has them around the gap below 4 GiB.
    regions = [
        Region(address, half, 0, PAGE_BYTES),
        Region(address + half, size - half, half, PAGE_BYTES),
    ]
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        socket.send_fds(line, [pack_handshake(regions)], [uffd])
    os.close(uffd)
    with os.fdopen(1, "wb") as output:
        output.write(read_archive(memory))
    # The handler lives as long as the process whose memory it serves: that of the guest does not end here.
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
