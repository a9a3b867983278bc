"""HTTP/1.1 as the fake engine speaks it: heads and bodies, read and written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

MAX_HEAD_BYTES = 64 << 10
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Head:
    """First line and header fields of a message; field names in lower case."""

    first: tuple[str, str, str]
    """Request: method, target, version. Response: version, status, reason."""
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.first[1])

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return "chunked" in self.fields.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int | None:
        """Length of the body; None: until the end of the connection, or none at all."""
        value = self.fields.get("content-length")
        return int(value) if value is not None and value.isdigit() else None


def pack_head(first: str, fields: Mapping[str, str]) -> bytes:
    """A head, ready to send. Raises ValueError for text that would end a line."""
    lines = [first, *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a line end within a head")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", errors="strict")


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Reads a head. Raises EOFError, or ValueError for what is none."""
    lines: list[str] = []
    size = 0
    while True:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other side closed the connection")
        size += len(line)
        if size > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            break
        lines.append(text)
    return parse_head(lines)


def parse_head(lines: list[str]) -> Head:
    """A head from its lines. Raises ValueError."""
    parts = lines[0].split(" ", 2) if lines else []
    if len(parts) < 2:
        raise ValueError("no HTTP head")
    first = (parts[0], parts[1], parts[2] if len(parts) > 2 else "")
    if first[0].startswith("HTTP/") and not first[1].isdigit():
        raise ValueError(f"no status: {lines[0]!r}")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"no header field: {line!r}")
        fields[name.strip().lower()] = value.strip()
    return Head(first, fields)


async def read_body(
    reader: asyncio.StreamReader, head: Head, *, to_end: bool, bodiless: bool = False
) -> AsyncIterator[bytes]:
    """The body in pieces. `to_end`: without a length it lasts until the connection ends (responses).

    Raises EOFError if it breaks off, ValueError for broken chunks.
    """
    if bodiless or (head.first[0].startswith("HTTP/") and head.status in (204, 304)):
        return
    if head.chunked:
        while size := int((await reader.readline()).split(b";")[0].strip() or b"x", 16):
            async for piece in _read_exactly(reader, size):
                yield piece
            await reader.readexactly(2)
        while (await reader.readline()).strip():
            pass
    elif head.length is not None:
        async for piece in _read_exactly(reader, head.length):
            yield piece
    elif to_end:
        while piece := await reader.read(CHUNK_BYTES):
            yield piece


async def _read_exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, CHUNK_BYTES))
        if not piece:
            raise EOFError("the body breaks off")
        size -= len(piece)
        yield piece
