"""The owner's end of a sandbox's socket: sends requests and matches answers by request id."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

from etude.errors import SandboxError
from etude.sandbox.answers import MAX_INTEGER, frame_problem
from etude.sandbox.calls import Answer
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack

_CREDENTIALS = struct.Struct("iII")
"""struct ucred: process, user, group."""
READY = 0
"""Id of the unrequested answer that a sandbox sends once it is ready."""
_MAX_FAILURE_CHARS = 4000
_MIN_CHECK_S = 0.1
"""Shortest time between two checks of a deadline that was postponed."""


class Channel:
    """The connection between one event loop and one sandbox. Nothing waits without a deadline.

    Waits for: answers of the sandbox. What unblocks it: an answer, the end of the socket, the deadline, or an
    invalid frame, after which no frame is processed. Answers to unknown ids are ignored: they may be for a
    cancelled caller, or for one of the machine from which this one was restored.
    """

    def __init__(self, sock: socket.socket, name: str, first_id: int = READY + 1) -> None:
        """`first_id`: id of the first request; for a restored machine beyond all its earlier ids, so that no
        late answer is mistaken for a new one. Closes the socket and raises SandboxError if it is invalid.
        """
        if type(first_id) is not int or not READY < first_id <= MAX_INTEGER:
            sock.close()
            raise SandboxError(
                "is not a valid first request id",
                field="next_id",
                received=first_id,
                fix="the snapshot is damaged: restore another one",
            )
        sock.setblocking(False)
        self._sock = sock
        self.name = name
        """The sandbox's id, for errors."""
        self._loop = asyncio.get_running_loop()
        self._unpacker = Unpacker()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._unsent = bytearray()
        self._next_id = first_id
        self._num_requests = 0
        self._end: str | None = None
        self._lent: list[int] | None = None
        """Descriptors received since `borrow_disk` was called; None outside of it."""
        self._wants_pid = False
        self.peer_pid = 0
        """Process id of the server in our namespace; 0: not requested, or not visible from it."""
        self.on_event: Callable[[Header, bytes], None] = lambda header, payload: None
        """Called with each event, which the sandbox sends unasked."""
        self.on_close: Callable[[str], None] = lambda reason: None
        """Called once with the reason when the channel is closed."""
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """Whether the sandbox can no longer be reached."""
        return self._end is not None

    async def request(self, header: Header, payload: bytes, deadline_s: float) -> Answer:
        """Sends a request and waits for its answer. Raises SandboxError.

        `deadline_s`: for this request, and the same for each one queued before it, as the server inside
        handles them one after the other.
        """
        header["id"] = request_id = header.get("id") or self.next_id()
        self._send(pack(header, payload))
        self._num_requests += 1
        try:
            return await self.answer(request_id, deadline_s * self._num_requests)
        finally:
            self._num_requests -= 1

    def next_id(self) -> int:
        """Allocates an id for a request that the caller sends itself."""
        self._next_id += 1
        return self._next_id - 1

    async def answer(
        self, request_id: int, deadline_s: float | None, frozen_s: Callable[[], float] = lambda: 0.0
    ) -> Answer:
        """Waits for the answer with the given id. Raises SandboxError after `deadline_s` seconds.

        A sandbox that misses the deadline is closed. None: the caller has a deadline of its own. `frozen_s`:
        total time for which the sandbox was frozen so far; what is added meanwhile does not count.
        """
        if self._end is not None:
            raise SandboxError(self._end, field="sandbox", received=self.name)
        future = self._loop.create_future()
        self._waiting[request_id] = future
        timer = None
        if deadline_s is not None:
            timer = _Deadline(deadline_s, frozen_s, self.close)
        try:
            header, payload = await future
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.pop(request_id, None)
        if "failure" in header:
            raise SandboxError(header["failure"][:_MAX_FAILURE_CHARS], field="sandbox", received=self.name)
        return header, payload

    async def borrow_disk(self, deadline_s: float) -> int:
        """A descriptor of the sandbox's own disk, which the caller closes. Raises SandboxError."""
        self._lent = []
        try:
            answer, _ = await self.request({"op": "lend"}, b"", deadline_s)
            if not self._lent:
                reason = answer.get("fault", ["", "its answer held no descriptor"])[1]
                raise SandboxError(f"its disk was not lent: {reason}", field="sandbox", received=self.name)
            return self._lent.pop()
        finally:
            lent, self._lent = self._lent or [], None
            for descriptor in lent:
                os.close(descriptor)

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Sends a message without waiting for an answer. Raises SandboxError."""
        self._send(pack(header, payload))

    def request_peer_pid(self) -> None:
        """Makes the kernel attach the sender's credentials: `peer_pid` is set with the first answer."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._wants_pid = True

    def _receive_with_pid(self) -> bytes:
        data, ancillary, _, _ = self._sock.recvmsg(1 << 18, socket.CMSG_SPACE(_CREDENTIALS.size))
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.peer_pid = _CREDENTIALS.unpack(value)[0]
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        self._wants_pid = False
        return data

    def close(self, reason: str) -> None:
        """Closes the socket; all pending requests raise SandboxError with the reason. Idempotent."""
        if self._end is not None:
            return
        self._end = reason
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError(reason, field="sandbox", received=self.name))
        self.on_close(reason)

    def _send(self, data: bytes) -> None:
        if self._end is not None:
            raise SandboxError(self._end, field="sandbox", received=self.name)
        if not self._unsent:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self.close(f"the sandbox died: {error.strerror}")
                return
            if not data:
                return
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._unsent += data

    def _writable(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"the sandbox died: {error.strerror}")
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            if self._wants_pid:
                data = self._receive_with_pid()
            elif self._lent is None:
                data = self._sock.recv(1 << 18)
            else:
                data, lent, _, _ = socket.recv_fds(self._sock, 1 << 18, 1)
                for descriptor in lent:
                    os.set_inheritable(descriptor, False)
                self._lent += lent
            frames = self._unpacker.feed(data)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"the sandbox died: {error.strerror}")
            return
        except FrameError as error:
            self.close(f"the sandbox does not speak the protocol: {error}")
            return
        for header, payload in frames:
            self._handle_frame(header, payload)
        if not data:
            self.close("the sandbox died: its server ended")

    def _handle_frame(self, header: Header, payload: bytes) -> None:
        """Dispatches one frame; closes the channel at the first invalid one."""
        if self._end is not None:
            return
        problem = frame_problem(header)
        if problem:
            self.close(f"the sandbox does not speak the protocol: it sent {problem}")
        elif "event" in header:
            # Called later, so that an error of a listener does not lose the answers of the same read.
            self._loop.call_soon(self.on_event, header, payload)
        else:
            future = self._waiting.get(header.get("id", READY))
            if future is not None and not future.done():
                future.set_result((header, payload))


class _Deadline:
    """Calls `close` after `deadline_s` seconds, not counting the time that `frozen_s` gains meanwhile."""

    def __init__(
        self, deadline_s: float, frozen_s: Callable[[], float], close: Callable[[str], None]
    ) -> None:
        self._deadline_s = deadline_s
        self._frozen_s = frozen_s
        self._close = close
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time() - frozen_s()
        self._timer = self._loop.call_later(deadline_s, self._check)

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        left_s = self._start_s + self._deadline_s + self._frozen_s() - self._loop.time()
        if left_s <= 0:
            self._close(f"no answer within {self._deadline_s:g} s")
        else:
            self._timer = self._loop.call_later(max(left_s, _MIN_CHECK_S), self._check)
