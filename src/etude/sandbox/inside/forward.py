"""Egress of a sandbox without a network: a listener on its loopback, forwarded to the owner.

Each accepted connection becomes a numbered stream of frames on the sandbox's line; outside, the egress proxy
serves it. Flow control: each side may have `WINDOW_BYTES` in flight that the other has not acknowledged.

    inside -> outside   {"event": "net.open" | "net.data" | "net.end" | "net.took" | "net.close", "stream": n}
    outside -> inside   {"op": "net.data" | "net.end" | "net.took" | "net.close", "stream": n}

`end`: no more data in this direction. `close`: both directions end; data sent before is still delivered.
"""

from __future__ import annotations

import contextlib
import select
import socket
from dataclasses import dataclass, field

from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.wire import Wire

PORT = 3128
FRAMES = frozenset({"net.data", "net.end", "net.took", "net.close"})
"""The owner's operations on one stream, which have no answer."""
WINDOW_BYTES = 256 << 10
MAX_STREAMS = 128
_CHUNK = 1 << 16


@dataclass
class _Stream:
    """One connection of a program inside."""

    number: int
    sock: socket.socket
    credit_bytes: int = WINDOW_BYTES
    """Bytes that may still be sent to the owner."""
    unsent: bytearray = field(default_factory=bytearray)
    owner_ended: bool = False
    """Whether the owner's direction has ended."""
    program_ended: bool = False
    """Whether the direction of the program inside has ended."""
    events: int = 0


class Forwarder:
    """Accepts connections on the sandbox's loopback and forwards them over the line."""

    def __init__(self, wire: Wire, poll: select.poll, port: int = PORT) -> None:
        """Raises OSError if the port is taken."""
        self._wire = wire
        self._poll = poll
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._listener.setblocking(False)
        self._streams: dict[int, _Stream] = {}
        self._by_descriptor: dict[int, _Stream] = {}
        self._next = 1
        poll.register(self._listener, select.POLLIN)

    def owns(self, descriptor: int) -> bool:
        return descriptor == self._listener.fileno() or descriptor in self._by_descriptor

    def on_ready(self, descriptor: int, events: int) -> None:
        """Handles poll events of the listener or of a connection."""
        if descriptor == self._listener.fileno():
            self._accept()
            return
        stream = self._by_descriptor[descriptor]
        if events & select.POLLOUT:
            self._flush(stream)
        if events & ~select.POLLOUT and stream.number in self._streams:
            self._read(stream)

    def handle(self, header: Header, payload: bytes) -> None:
        """Handles a frame from the owner; ignores those for a stream that has ended."""
        stream = self._streams.get(header["stream"])
        if stream is None:
            return
        if header["op"] == "net.data":
            stream.unsent += payload
            self._flush(stream)
        elif header["op"] == "net.end":
            stream.owner_ended = True
            self._flush(stream)
        elif header["op"] == "net.close":
            stream.owner_ended = stream.program_ended = True
            self._flush(stream)
        else:
            stream.credit_bytes += header["bytes"]
            self._watch(stream)

    def drop_all(self) -> None:
        """Ends every connection, whose owner is gone."""
        for stream in list(self._streams.values()):
            self._drop(stream)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # The program inside has closed it, or the descriptors are used up.
            return
        if len(self._streams) >= MAX_STREAMS:
            sock.close()
            return
        sock.setblocking(False)
        stream = _Stream(self._next, sock)
        self._next += 1
        self._streams[stream.number] = stream
        self._by_descriptor[sock.fileno()] = stream
        self._wire.send({"event": "net.open", "stream": stream.number})
        self._watch(stream)

    def _read(self, stream: _Stream) -> None:
        try:
            data = stream.sock.recv(min(_CHUNK, max(1, stream.credit_bytes)))
        except BlockingIOError:
            return
        except OSError:
            self._abandon(stream)
            return
        if not data:
            stream.program_ended = True
            self._wire.send({"event": "net.end", "stream": stream.number})
            self._watch(stream)
            return
        stream.credit_bytes -= len(data)
        self._wire.send({"event": "net.data", "stream": stream.number}, data)
        self._watch(stream)

    def _flush(self, stream: _Stream) -> None:
        try:
            sent = stream.sock.send(stream.unsent) if stream.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._abandon(stream)
            return
        if sent:
            del stream.unsent[:sent]
            self._wire.send({"event": "net.took", "stream": stream.number, "bytes": sent})
        self._watch(stream)

    def _watch(self, stream: _Stream) -> None:
        if stream.owner_ended and not stream.unsent:
            if stream.program_ended:
                self._drop(stream)
                return
            with contextlib.suppress(OSError):
                stream.sock.shutdown(socket.SHUT_WR)
        events = select.POLLIN if stream.credit_bytes > 0 and not stream.program_ended else 0
        events |= select.POLLOUT if stream.unsent else 0
        if events and not stream.events:
            self._poll.register(stream.sock, events)
        elif events and events != stream.events:
            self._poll.modify(stream.sock, events)
        elif stream.events and not events:
            self._poll.unregister(stream.sock)
        stream.events = events

    def _abandon(self, stream: _Stream) -> None:
        """Ends a stream whose program has closed its connection."""
        self._wire.send({"event": "net.close", "stream": stream.number})
        self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        if stream.events:
            self._poll.unregister(stream.sock)
        del self._streams[stream.number]
        del self._by_descriptor[stream.sock.fileno()]
        stream.sock.close()
