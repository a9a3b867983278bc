"""Writes EROFS file systems: read-only, uncompressed, equal trees give equal bytes.

Written here because the usual tools put directory order or time stamps of the building host into what they
make, and need root for the owners. Everything belongs to root and bears one time. Format: the kernel's
`fs/erofs/erofs_fs.h`, compact inodes, flat layouts.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

BLOCK_BYTES = 4096
_MAGIC = 0xE0F5E1E2
_SUPER_OFFSET = 1024
_FIRST_INODE = 1152
_SLOT_BYTES = 32
"""Inodes are numbered in units of this size; a compact inode takes one."""
_MAX_TAIL_BYTES = 2048
"""Longer ends of files get a block of their own."""
_PLAIN, _INLINE = 0, 2
_TYPES = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFLNK: 7}


@dataclass
class Node:
    """A file, directory or symbolic link. Hard links are the same node under two names."""

    mode: int
    """Type and permissions."""
    size_bytes: int = 0
    read: Callable[[], bytes] = bytes
    """The content of a file, the target of a link."""
    children: dict[str, Node] = field(default_factory=dict)
    num_links: int = 0
    offset: int = 0
    """Of the inode."""
    first_block: int = 0
    parent: Node | None = None

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def tail_bytes(self) -> int:
        """What follows the inode itself; 0 if all data lie in blocks."""
        tail = self.size_bytes % BLOCK_BYTES
        return tail if tail <= _MAX_TAIL_BYTES else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of data outside the inode."""
        return (self.size_bytes - self.tail_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES

    @property
    def number(self) -> int:
        """Of the inode."""
        return self.offset // _SLOT_BYTES


def write_erofs(root: Node, target: BinaryIO, uuid: bytes, time_s: int) -> int:
    """Writes the tree below `root`; `uuid` are 16 bytes. Returns the size in bytes."""
    nodes = _prepare(root)
    end = _place(nodes)
    num_blocks = -(-end // BLOCK_BYTES)
    for node in nodes:
        node.first_block = num_blocks
        num_blocks += node.num_blocks
    target.truncate(num_blocks * BLOCK_BYTES)
    target.seek(_SUPER_OFFSET)
    target.write(_superblock(root, len(nodes), num_blocks, uuid, time_s))
    for index, node in enumerate(nodes):
        data = _directory(node) if node.is_directory else node.read()
        assert len(data) == node.size_bytes, "a node's content has the size that was promised"
        split = len(data) - node.tail_bytes
        target.seek(node.offset)
        target.write(_inode(node, index) + data[split:])
        if split:
            target.seek(node.first_block * BLOCK_BYTES)
            target.write(data[:split])
    return num_blocks * BLOCK_BYTES


def _prepare(root: Node) -> list[Node]:
    """All nodes, the root first, in sorted order; sizes and link counts of directories filled in."""
    nodes: dict[int, Node] = {}
    pending = [root]
    root.parent = root
    while pending:
        node = pending.pop()
        if id(node) in nodes:
            node.num_links += 1
            continue
        nodes[id(node)] = node
        node.num_links = 1
        if node.is_directory:
            node.num_links = 2 + sum(child.is_directory for child in node.children.values())
            node.size_bytes = _directory_bytes(node)
            for name in sorted(node.children, reverse=True):
                child = node.children[name]
                if child.is_directory:
                    child.parent = node
                pending.append(child)
    return list(nodes.values())


def _place(nodes: list[Node]) -> int:
    """Gives each inode its place, tail behind it within one block; returns the end of all."""
    position = _FIRST_INODE
    for node in nodes:
        needed = _SLOT_BYTES + node.tail_bytes
        if position % BLOCK_BYTES + needed > BLOCK_BYTES:
            position = -(-position // BLOCK_BYTES) * BLOCK_BYTES
        node.offset = position
        position += -(-needed // _SLOT_BYTES) * _SLOT_BYTES
    return position


def _superblock(root: Node, num_nodes: int, num_blocks: int, uuid: bytes, time_s: int) -> bytes:
    return struct.pack(
        "<IIIBBHQQIIII16s16sI44x", _MAGIC, 0, 0, 12, 0, root.number, num_nodes, time_s, 0,
        num_blocks, 0, 0, uuid, b"", 0,
    )  # fmt: skip


def _inode(node: Node, index: int) -> bytes:
    layout = _INLINE if node.tail_bytes else _PLAIN
    return struct.pack(
        "<HHHHIIIIHHI", layout << 1, 0, node.mode, node.num_links, node.size_bytes, 0, node.first_block,
        index + 1, 0, 0, 0,
    )  # fmt: skip


def _blocks_of(node: Node) -> Iterator[list[tuple[bytes, Node]]]:
    """A directory's entries in order, as many as fit into each block."""
    entries = {b".": node, b"..": node.parent or node}
    entries.update({name.encode(): child for name, child in node.children.items()})
    block: list[tuple[bytes, Node]] = []
    used = 0
    for name in sorted(entries):
        if used + 12 + len(name) > BLOCK_BYTES:
            yield block
            block, used = [], 0
        block.append((name, entries[name]))
        used += 12 + len(name)
    yield block


def _directory_bytes(node: Node) -> int:
    *full, last = _blocks_of(node)
    return len(full) * BLOCK_BYTES + sum(12 + len(name) for name, _ in last)


def _directory(node: Node) -> bytes:
    parts: list[bytes] = []
    for block in _blocks_of(node):
        name_offset = 12 * len(block)
        head = bytearray()
        for name, child in block:
            head += struct.pack("<QHBx", child.number, name_offset, _TYPES[stat.S_IFMT(child.mode)])
            name_offset += len(name)
        parts.append((bytes(head) + b"".join(name for name, _ in block)).ljust(BLOCK_BYTES, b"\0"))
    return b"".join(parts)[: node.size_bytes]
