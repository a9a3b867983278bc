"""Network access of a sandbox: TCP streams that the program inside forwards to the egress proxy.

The sandbox's network namespace has no connection to the outside: its proxy is a listener on its own loopback,
and every byte is multiplexed over the sandbox's channel.
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
    """A `network.streams.Stream` over a channel, with a flow-control window."""

    def __init__(self, channel: Channel, number: int, on_close: Callable[[int], None]) -> None:
        self.number = number
        self._channel = channel
        self._on_close = on_close
        self._received = bytearray()
        self._ended = False
        self._closed = False
        self._eof_sent = False
        self._credit_bytes = WINDOW_BYTES
        self._changed = asyncio.Event()

    def on_event(self, header: Header, payload: bytes) -> None:
        """Handles a frame for this stream. Data beyond the window closes the stream."""
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
            self.mark_closed()
        self._changed.set()

    def mark_closed(self) -> None:
        """Marks both directions as ended: the peer has closed the stream."""
        self._closed = self._ended = True
        self._changed.set()

    async def read(self, num_bytes: int) -> bytes:
        """Waits for bytes, and returns at most `num_bytes`; b"" at the end of the stream."""
        while not self._received and not self._ended:
            await self._change()
        data = bytes(self._received[:num_bytes])
        del self._received[: len(data)]
        if data and not self._closed and not self._channel.closed:
            self._channel.send({"op": "net.took", "stream": self.number, "bytes": len(data)})
        return data

    async def write(self, data: bytes) -> None:
        """Sends all of `data`, as fast as the peer's window allows. Raises ConnectionResetError."""
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
        """Ends the written direction. Idempotent."""
        if self._eof_sent:
            return
        self._eof_sent = True
        if not self._closed and not self._channel.closed:
            self._channel.send({"op": "net.end", "stream": self.number})

    def close(self) -> None:
        """Ends the stream in both directions. Idempotent."""
        if not self._closed and not self._channel.closed:
            self._channel.send({"op": "net.close", "stream": self.number})
        self.mark_closed()
        self._on_close(self.number)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Egress:
    """The forwarded streams of one sandbox, served by its proxy."""

    def __init__(self, channel: Channel, proxy: EgressProxy) -> None:
        self._channel = channel
        self._proxy = proxy
        self._streams: dict[int, ForwardedStream] = {}
        self._tasks = Tasks()

    async def open(self) -> None:
        """Makes the program inside listen. Raises SandboxError."""
        await self._channel.request({"op": "net.listen", "port": PORT}, b"", LISTEN_S)

    def on_event(self, header: Header, payload: bytes) -> None:
        """Handles a `net.*` frame."""
        number = header["stream"]
        if header["event"] == "net.open":
            if number in self._streams or len(self._streams) >= MAX_STREAMS:
                self._channel.send({"op": "net.close", "stream": number})
                return
            stream = ForwardedStream(self._channel, number, self._remove_stream)
            self._streams[number] = stream
            self._tasks.start(self._proxy.serve(stream))
        elif number in self._streams:
            self._streams[number].on_event(header, payload)

    def _remove_stream(self, number: int) -> None:
        self._streams.pop(number, None)

    def close(self) -> None:
        """Ends every stream. Idempotent."""
        for stream in list(self._streams.values()):
            stream.mark_closed()
        self._tasks.cancel()
