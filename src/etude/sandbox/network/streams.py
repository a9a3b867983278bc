"""Byte streams of the proxy, over sockets or over a sandbox's channel."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Protocol

CHUNK_BYTES = 64 << 10
_BARE_LF = re.compile(rb"(?<!\r)\n")


class Stream(Protocol):
    """A bidirectional byte stream between two programs."""

    async def read(self, num_bytes: int) -> bytes:
        """Reads 1 to `num_bytes` bytes; empty once the other side has ended its direction. Raises OSError."""
        ...

    async def write(self, data: bytes) -> None:
        """Sends all of `data`; returns when the stream is ready for more. Raises OSError."""
        ...

    async def write_eof(self) -> None:
        """Ends this side's direction; the other stays open. Idempotent. Raises OSError."""
        ...

    def close(self) -> None:
        """Ends both directions and frees the stream without waiting. Idempotent."""
        ...


class AsyncioStream(Stream):
    """`Stream` over a pair of asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # With nothing buffered here, a write that has returned needs no flush at the end.
        writer.transport.set_write_buffer_limits(high=0)

    async def read(self, num_bytes: int) -> bytes:
        return await self._reader.read(num_bytes)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def write_eof(self) -> None:
        if self._writer.can_write_eof() and not self._writer.transport.is_closing():
            self._writer.write_eof()

    def close(self) -> None:
        """See Stream.close. Unsent bytes of a cancelled write are dropped: they may never be read."""
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()
        else:
            self._writer.close()


class BufferedStream(Stream):
    """`Stream` around another one, with reading by line and by message head."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def read(self, num_bytes: int) -> bytes:
        if not self._buffer:
            return await self._stream.read(num_bytes)
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data

    async def wait_readable(self) -> bool:
        """Waits until there are bytes to read; False if the other side has ended its direction."""
        if not self._buffer:
            self._buffer += await self._stream.read(CHUNK_BYTES)
        return bool(self._buffer)

    async def read_line(self, limit_bytes: int) -> bytes | None:
        """Reads a line with its LF; None if more than `limit_bytes` or the end of the stream come first."""
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            start = len(self._buffer)
            if start > limit_bytes or not await self._fill():
                return None
        return self._pop_bytes(end + 1) if end < limit_bytes else None

    async def read_head(self, limit_bytes: int) -> bytes | None:
        """Reads up to and with an empty line, or up to a line end without CR, which heads cannot have.

        None if more than `limit_bytes` come first. Raises EOFError if the stream ends first.
        """
        start = 0
        while True:
            end = self._buffer.find(b"\r\n\r\n", start)
            bare = _BARE_LF.search(self._buffer, start)
            if bare is not None and (end < 0 or bare.end() <= end):
                return self._pop_bytes(bare.end())
            if end >= 0:
                return self._pop_bytes(end + 4) if end + 4 <= limit_bytes else None
            if len(self._buffer) > limit_bytes:
                return None
            # The empty line may begin in the last three bytes.
            start = max(0, len(self._buffer) - 3)
            if not await self._fill():
                raise EOFError("the stream ended within a head")

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def write_eof(self) -> None:
        await self._stream.write_eof()

    def close(self) -> None:
        self._stream.close()

    async def _fill(self) -> bool:
        data = await self._stream.read(CHUNK_BYTES)
        self._buffer += data
        return bool(data)

    def _pop_bytes(self, num_bytes: int) -> bytes:
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data


class UpstreamError(Exception):
    """The server's side of a connection failed, as opposed to the client's."""


class UpstreamStream(Stream):
    """`Stream` to a server: counts bytes, reports progress, and raises UpstreamError instead of OSError."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.num_sent_bytes = self.num_received_bytes = 0
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each write and read."""

    async def read(self, num_bytes: int) -> bytes:
        """See Stream.read. Raises UpstreamError."""
        with _upstream_errors():
            data = await self._stream.read(num_bytes)
        self.num_received_bytes += len(data)
        self.on_progress()
        return data

    async def write(self, data: bytes) -> None:
        """See Stream.write. Raises UpstreamError."""
        with _upstream_errors():
            await self._stream.write(data)
        self.num_sent_bytes += len(data)
        self.on_progress()

    async def write_eof(self) -> None:
        """See Stream.write_eof. Raises UpstreamError."""
        with _upstream_errors():
            await self._stream.write_eof()

    def close(self) -> None:
        self._stream.close()


@contextlib.contextmanager
def _upstream_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UpstreamError(str(error)) from error
