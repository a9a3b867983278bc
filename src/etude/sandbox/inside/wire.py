"""The line to the owner: frames in, frames out, over a socket, a pair of pipes or a virtio-serial port.

Sending never blocks the server: frames that the owner does not read yet are queued, and once more than
`HIGH_WATER_BYTES` are queued, the output of commands is no longer read, so that a command that prints
gigabytes is slowed down instead of filling memory.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterator

from etude.sandbox.inside.frames import Header, Unpacker, pack, pack_head

HIGH_WATER_BYTES = 1 << 20
_CHUNK = 1 << 18


class Wire:
    """Frames over two descriptors (which may be the same one)."""

    def __init__(self, reader: int, writer: int, poll: select.poll) -> None:
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        self.reader = reader
        self.writer = writer
        self._poll = poll
        self._unpacker = Unpacker()
        # Reused: the system would map and unmap a new one for each request, which takes longer than reading a
        # small file.
        self._arrived = bytearray(_CHUNK)
        self._unsent = bytearray()
        self._held: list[bytes] | None = None
        self._batch: list[bytes] | None = None
        self._attached = True
        self.on_drained: Callable[[], None] = lambda: None
        """Called when the queue is empty again."""
        poll.register(reader, select.POLLIN)

    @property
    def congested(self) -> bool:
        """Whether producers should wait."""
        return len(self._unsent) + sum(map(len, self._held or ())) > HIGH_WATER_BYTES

    def receive(self) -> list[tuple[Header, bytes]] | None:
        """Reads the frames that have arrived; None when the owner has closed its end. Raises FrameError."""
        try:
            count = os.readv(self.reader, [self._arrived])
        except BlockingIOError:
            return []
        return self._unpacker.feed(memoryview(self._arrived)[:count]) if count else None

    def send(self, header: Header, payload: bytes | bytearray = b"") -> None:
        """Sends a frame, now or later. Raises FrameError, BrokenPipeError and the like."""
        if len(payload) > _CHUNK and self._held is None and self._batch is None:
            # In two parts: joining them would copy what may be most of the memory.
            self._push(pack_head(header, len(payload)))
            self._push(payload)
            return
        frame = pack(header, payload)
        if self._held is not None:
            self._held.append(frame)
        elif self._batch is not None:
            self._batch.append(frame)
        else:
            self._push(frame)

    @contextlib.contextmanager
    def batching(self) -> Iterator[None]:
        """Sends the frames of the block together at its end: one call for the answers to many requests."""
        self._batch = []
        try:
            yield
        finally:
            self._push_batch()
            self._batch = None

    def lend(self, header: Header, descriptor: int) -> None:
        """Sends a frame with a descriptor attached. The line must be a socket; blocks until it is sent."""
        os.set_blocking(self.writer, True)
        try:
            self._push_batch()
            while self._unsent:
                self.flush()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            with socket.socket(fileno=os.dup(self.writer)) as line:
                line.sendmsg([pack(header)], rights)
        finally:
            os.set_blocking(self.writer, False)

    def hold(self) -> None:
        """Holds back all frames from now on: the machine is about to be copied."""
        self._push_batch()
        self._held = []

    def release(self, header: Header) -> None:
        """Ends `hold`: sends this frame, then those that were held back."""
        held, self._held = self._held or [], None
        self.send(header)
        self._push_batch()
        for frame in held:
            self._push(frame)
        if not self._unsent:
            self.on_drained()

    def connected(self) -> bool:
        """Whether an owner is at the other end; if so, resumes reading. For lines that can be reconnected."""
        probe = select.poll()
        probe.register(self.reader, select.POLLIN)
        ready = probe.poll(0)
        if ready and ready[0][1] & (select.POLLHUP | select.POLLERR):
            return False
        self._attached = True
        self._poll.register(self.reader, select.POLLIN)
        if self._unsent:
            self._watch_writer(True)
        return True

    def disconnect(self) -> None:
        """Stops reading and drops partial and queued frames: the next connection starts with a new frame."""
        self._attached = False
        self._poll.unregister(self.reader)
        if self._unsent and self.writer != self.reader:
            self._poll.unregister(self.writer)
        self._unpacker = Unpacker()
        self._unsent.clear()
        self.on_drained()

    def flush(self) -> None:
        """Sends queued frames, as far as the owner reads them."""
        try:
            del self._unsent[: os.write(self.writer, self._unsent)]
        except BlockingIOError:
            return
        if not self._unsent:
            self._watch_writer(False)
            self.on_drained()

    def _push_batch(self) -> None:
        if self._batch:
            self._push(b"".join(self._batch))
            self._batch.clear()

    def _push(self, frame: bytes | bytearray) -> None:
        sent = 0
        if not self._unsent and self._attached:
            with contextlib.suppress(BlockingIOError):
                sent = os.write(self.writer, frame)
            if sent == len(frame):
                return
            self._watch_writer(True)
        self._unsent += memoryview(frame)[sent:]

    def _watch_writer(self, wanted: bool) -> None:
        if not self._attached:
            return
        if self.writer == self.reader:
            self._poll.modify(self.reader, select.POLLIN | (select.POLLOUT if wanted else 0))
        elif wanted:
            self._poll.register(self.writer, select.POLLOUT)
        else:
            self._poll.unregister(self.writer)
