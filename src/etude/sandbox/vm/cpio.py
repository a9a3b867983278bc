"""Writes initramfs archives (cpio, `newc`): equal entries, equal bytes. The kernel takes several in a row."""

from __future__ import annotations

import stat
from collections.abc import Iterable

DIRECTORY = stat.S_IFDIR | 0o755
PROGRAM = stat.S_IFREG | 0o755
FILE = stat.S_IFREG | 0o644
_BLOCK_BYTES = 512

Entry = tuple[str, int, bytes]
"""Name without a leading slash, mode, content."""


def pack_cpio(entries: Iterable[Entry]) -> bytes:
    """One archive; directories must come before what lies in them."""
    archive = bytearray()
    for number, (name, mode, data) in enumerate(entries, 1):
        archive += _record(number, name, mode, data)
    archive += _record(0, "TRAILER!!!", 0, b"")
    archive += bytes(-len(archive) % _BLOCK_BYTES)
    return bytes(archive)


def _record(number: int, name: str, mode: int, data: bytes) -> bytes:
    path = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % value for value in fields) + path
    head += bytes(-len(head) % 4)
    return head + data + bytes(-len(data) % 4)
