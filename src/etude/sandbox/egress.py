"""A sandbox's way out: streams that the program inside forwards, served by the egress proxy.

Nothing is connected to the sandbox's network namespace: its proxy is a listener on its own loopback, and
every byte comes over the sandbox's one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from etude.kit.tasks import Tasks
from etude.sandbox.channel import Channel
from etude.sandbox.inside.forward import MAX_STREAMS, PORT, WINDOW_BYTES
from etude.sandbox.inside.frames import Header
from etude.sandbox.network.proxy import EgressProxy

LISTEN_S = 10.0


class ForwardedStream:
    """`network.streams.Stream` over a channel."""

    def __init__(self, channel: Channel, number: int, on_close: Callable[[int], None]) -> None:
        self.number = number
        self._channel = channel
        self._on_close = on_close
        self._received = bytearray()
        self._ended = False
        self._closed = False
        self._said_end = False
        self._credit_bytes = WINDOW_BYTES
        self._changed = asyncio.Event()

    def on_event(self, header: Header, payload: bytes) -> None:
        """A frame of the program inside about this stream. One that keeps no bounds loses its stream."""
        kind = header["event"]
        if kind == "net.data":
            self._received += payload
            if len(self._received) > WINDOW_BYTES:
                self._received.clear()
                self.close()
        elif kind == "net.end":
            self._ended = True
        elif kind == "net.took":
            self._credit_bytes = min(self._credit_bytes + max(0, header["bytes"]), WINDOW_BYTES)
        else:
            self.abandon()
        self._changed.set()

    def abandon(self) -> None:
        """The other end is gone."""
        self._closed = self._ended = True
        self._changed.set()

    async def read(self, num_bytes: int) -> bytes:
        """Some bytes, at most `num_bytes`; b"" at the end."""
        while not self._received and not self._ended:
            await self._change()
        data = bytes(self._received[:num_bytes])
        del self._received[: len(data)]
        if data and not self._closed and not self._channel.closed:
            self._channel.send({"op": "net.took", "stream": self.number, "bytes": len(data)})
        return data

    async def write(self, data: bytes) -> None:
        """Sends all of it, as fast as the other end takes it. Raises ConnectionResetError."""
        view = memoryview(data)
        while view:
            while self._credit_bytes <= 0 and not self._closed:
                await self._change()
            if self._closed or self._channel.closed:
                raise ConnectionResetError("the sandbox closed the connection")
            piece = view[: self._credit_bytes]
            self._credit_bytes -= len(piece)
            self._channel.send({"op": "net.data", "stream": self.number}, bytes(piece))
            view = view[len(piece) :]

    async def write_eof(self) -> None:
        """Says that no more will be written. Idempotent."""
        if self._said_end:
            return
        self._said_end = True
        if not self._closed and not self._channel.closed:
            self._channel.send({"op": "net.end", "stream": self.number})

    def close(self) -> None:
        """Ends the stream in both directions. Idempotent."""
        if not self._closed and not self._channel.closed:
            self._channel.send({"op": "net.close", "stream": self.number})
        self.abandon()
        self._on_close(self.number)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Egress:
    """All streams of one sandbox."""

    def __init__(self, channel: Channel, proxy: EgressProxy) -> None:
        self._channel = channel
        self._proxy = proxy
        self._streams: dict[int, ForwardedStream] = {}
        self._tasks = Tasks()

    async def open(self) -> None:
        """Has the program inside listen. Raises SandboxError."""
        await self._channel.request({"op": "net.listen", "port": PORT}, b"", LISTEN_S)

    def on_event(self, header: Header, payload: bytes) -> None:
        """A `net.*` frame."""
        number = header["stream"]
        if header["event"] == "net.open":
            if number in self._streams or len(self._streams) >= MAX_STREAMS:
                self._channel.send({"op": "net.close", "stream": number})
                return
            stream = ForwardedStream(self._channel, number, self._forget)
            self._streams[number] = stream
            self._tasks.start(self._proxy.serve(stream))
        elif number in self._streams:
            self._streams[number].on_event(header, payload)

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)

    def close(self) -> None:
        """Ends every stream. Idempotent."""
        for stream in list(self._streams.values()):
            stream.abandon()
        self._tasks.cancel()
