"""Bridges a `Channel`, which wants a socket for good, and a stream that has another form or may be exchanged.

    Channel <-> socket pair <-> Line <-> the container's attached stream

Both directions are copied with back pressure. A remote end that closes unasked ends the line: the channel
then says that the sandbox died. `suspend` takes the remote end away in good order and `connect` gives the
next one; what the channel sends in between waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from etude.kit.tasks import end_tasks

_CHUNK = 1 << 18

Decode = Callable[[bytes], bytes]
"""From what the remote end sends to what the channel reads. Raises ValueError for what it cannot read."""


class Line:
    """One bridge. For one event loop."""

    def __init__(self, on_end: Callable[[str], None] = lambda reason: None) -> None:
        """`on_end` is called once if the remote end goes away unasked, with the reason."""
        ours, self.socket = socket.socketpair()
        """The channel's end."""
        self._ours: socket.socket | None = ours
        self._local: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._remote: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._on_end = on_end
        self._closed = False

    async def connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decode: Decode = lambda data: data,
    ) -> None:
        """From now on the line ends there."""
        if self._local is None:
            ours, self._ours = self._ours, None
            self._local = await asyncio.open_connection(sock=ours)
        self._remote = writer
        self._tasks = [
            asyncio.create_task(self._upward(self._local[0], writer)),
            asyncio.create_task(self._downward(reader, self._local[1], decode)),
        ]

    async def suspend(self) -> None:
        """Lets go of the remote end. The caller has seen to it that nothing is under way towards us."""
        tasks, self._tasks = self._tasks, []
        await end_tasks(*tasks)
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    async def close(self) -> None:
        """Ends the line. Idempotent."""
        self._closed = True
        await self.suspend()
        if self._local is not None:
            self._local[1].close()
            self._local = None
        if self._ours is not None:
            self._ours.close()
            self._ours = None

    async def _upward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
        except OSError as error:
            self._end(f"the line broke: {error}")

    async def _downward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decode: Decode
    ) -> None:
        reason = "the other end closed the line"
        try:
            while data := await reader.read(_CHUNK):
                writer.write(decode(data))
                await writer.drain()
        except (OSError, ValueError) as error:
            reason = f"the line broke: {error}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        if self._local is not None:
            with contextlib.suppress(OSError):
                self._local[1].close()
        self._on_end(reason)
