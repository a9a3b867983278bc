"""In-memory streams and a resolver with listed answers, for tests of the sandbox network proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

_PIPE_BYTES = 64 << 10


class _Pipe:
    """One direction of a stream; buffers up to `_PIPE_BYTES` unread bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        self.broken = False
        self.changed = asyncio.Condition()

    async def put(self, data: bytes) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.data) < _PIPE_BYTES or self.broken)
            if self.broken or self.ended:
                raise BrokenPipeError("the stream is closed")
            self.data += data
            self.changed.notify_all()

    async def read(self, num_bytes: int) -> bytes:
        async with self.changed:
            await self.changed.wait_for(lambda: self.data or self.ended or self.broken)
            data = bytes(self.data[:num_bytes])
            del self.data[:num_bytes]
            self.changed.notify_all()
            return data

    async def end(self) -> None:
        async with self.changed:
            self.ended = True
            self.changed.notify_all()


class MemoryStream:
    """One end of a pair of connected `Stream`s. See `memory_streams`."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closing: asyncio.Task[None] | None = None

    async def read(self, num_bytes: int) -> bytes:
        """See Stream.read."""
        return await self._incoming.read(num_bytes)

    async def write(self, data: bytes) -> None:
        """See Stream.write. Raises BrokenPipeError once the other side is closed."""
        await self._outgoing.put(data)

    async def write_eof(self) -> None:
        """See Stream.write_eof."""
        await self._outgoing.end()

    def close(self) -> None:
        """See Stream.close."""
        if self._closing is None:
            self._incoming.broken = True
            self._outgoing.ended = True
            self._closing = asyncio.ensure_future(self._wake())

    @property
    def closed(self) -> bool:
        """Whether this side was closed."""
        return self._closing is not None

    async def _wake(self) -> None:
        for pipe in (self._incoming, self._outgoing):
            async with pipe.changed:
                pipe.changed.notify_all()


def memory_streams() -> tuple[MemoryStream, MemoryStream]:
    """Two connected streams."""
    first, second = _Pipe(), _Pipe()
    return MemoryStream(first, second), MemoryStream(second, first)


class FakeResolver:
    """A resolver with a list of answers per name: each query gets the next one, the last one repeatedly."""

    def __init__(self, answers: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._answers = answers
        self.queries: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        """See Resolve. Raises OSError for a name without answers."""
        answers = self._answers.get(name, ())
        index = min(self.queries.count(name), len(answers) - 1)
        self.queries.append(name)
        if index < 0:
            raise OSError("no such name")
        return answers[index]
