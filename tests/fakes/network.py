"""Streams in memory and a resolver that answers from a list: for tests, and for whoever uses the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

_PIPE_BYTES = 64 << 10


class _Pipe:
    """One direction: holds up to `_PIPE_BYTES` that nobody has read."""

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

    async def take(self, num_bytes: int) -> bytes:
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
    """`Stream` whose other side is another one, see `memory_streams`."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closing: asyncio.Task[None] | None = None

    async def read(self, num_bytes: int) -> bytes:
        """See Stream.read."""
        return await self._incoming.take(num_bytes)

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


class FakeNames:
    """A resolver with a list of answers for each name: one per question, the last one again and again."""

    def __init__(self, answers: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        """See Resolve. Raises OSError for a name without answers."""
        answers = self._answers.get(name, ())
        place = min(self.asked.count(name), len(answers) - 1)
        self.asked.append(name)
        if place < 0:
            raise OSError("no such name")
        return answers[place]
