"""Answers of long calls, as a stream of frames with heartbeats.

A `LongAnswer` waits for: the work, the client's disconnect, output, the next heartbeat. A disconnect cancels
the work (as of a command), unless the work must be finished (as of a snapshot). Buffers are bounded: output
that the client does not read in time is dropped and counted, and a client that reads nothing for `STALL_S`
counts as disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError
from etude.serving.answers import ClientLeftError, body, push
from etude.serving.application import STALL_S, Json, until_disconnected
from etude.serving.errors import ErrorShape
from etude.serving.messages import BEAT_S, FRAMES, Encoded, Header

_log = logging.getLogger("etude.serving")

BUFFER_BYTES = 4 << 20
"""Most buffered output of one command; output beyond it is dropped."""

Work = Coroutine[Any, Any, Encoded]
Pack = Callable[[Header, bytes], bytes]
"""Encodes a header and bytes as a frame."""


class OutputBuffer:
    """A bounded buffer of a command's output, between the command and its client."""

    def __init__(self, pack: Pack, limit_bytes: int = BUFFER_BYTES) -> None:
        self._pack = pack
        self._limit_bytes = limit_bytes
        self._frames: list[bytes] = []
        self._pieces: deque[tuple[int, bytearray]] = deque()
        self._held_bytes = 0
        self._dropped_bytes = 0
        self._something = asyncio.Event()
        self.finished = asyncio.Event()
        """Set when no more output comes, or when it is no longer read."""

    def put(self, fd: int, data: bytes) -> None:
        """Adds output; what does not fit is dropped."""
        if self.finished.is_set():
            return
        room = self._limit_bytes - self._held_bytes
        self._dropped_bytes += max(0, len(data) - room)
        data = data[: max(0, room)]
        if data:
            if not self._pieces or self._pieces[-1][0] != fd:
                self._pieces.append((fd, bytearray()))
            self._pieces[-1][1].extend(data)
            self._held_bytes += len(data)
        self._something.set()

    def put_frame(self, header: Header) -> None:
        """Adds a whole frame, unless it does not fit."""
        frame = self._pack(header, b"")
        if not self.finished.is_set() and self._held_bytes + len(frame) <= self._limit_bytes:
            self._frames.append(frame)
            self._held_bytes += len(frame)
            self._something.set()

    def finish(self) -> None:
        """Sets `finished` and wakes `wait`."""
        self.finished.set()
        self._something.set()

    async def wait(self) -> None:
        """Waits until there are frames, or until the output is finished."""
        await self._something.wait()

    def pop_frames(self) -> list[bytes]:
        """Empties the buffer; its contents as frames."""
        frames, self._frames = self._frames, []
        frames += [self._pack({"event": "output", "fd": fd}, bytes(data)) for fd, data in self._pieces]
        if self._dropped_bytes:
            frames.append(self._pack({"event": "dropped", "num_bytes": self._dropped_bytes}, b""))
        self._pieces.clear()
        self._held_bytes = self._dropped_bytes = 0
        if not self.finished.is_set():
            self._something.clear()
        return frames


class LongAnswer(Response):
    """A response that runs `work` and streams frames, the last of them its result or its error."""

    def __init__(
        self,
        work: Work,
        output: OutputBuffer | None = None,
        finish: Callable[[asyncio.Task[Encoded]], object] | None = None,
        *,
        pack: Pack,
        errors: ErrorShape,
        plain: bool = False,
        first: bytes | None = None,
        tail: AsyncGenerator[bytes, None] | None = None,
        cleanup: Callable[[], Awaitable[None]] | None = None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`finish`: takes over the work if its result was not delivered; without it the work is cancelled.

        `plain`: the client reads JSON, not frames, and gets no heartbeats. `first`: a frame that is sent at
        once. `tail`: frames between the end of the work and its result. `cleanup` is called at the end.
        """
        super().__init__()
        self._work = work
        self._output = output
        self._finish = finish
        self._pack = pack
        self._errors = errors
        self._plain = plain
        self._first = first
        self._tail = tail
        self._cleanup = cleanup
        self._on_error = on_error
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer by ASGI."""
        work = asyncio.ensure_future(self._work)
        work.add_done_callback(self._report_error)
        gone = asyncio.ensure_future(until_disconnected(receive))
        delivered = False
        try:
            if self._first is not None:
                await self._send(send, self._first)
            await self._relay(work, gone, send)
            if work.done() and not gone.done():
                await self._conclude(work, scope, receive, send)
                delivered = True
        except ClientLeftError:
            pass
        finally:
            gone.cancel()
            if self._output is not None:
                self._output.finish()
            if not delivered and self._finish is not None:
                self._finish(work)
            elif not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=STALL_S)
            if self._tail is not None:
                await self._tail.aclose()
            if self._cleanup is not None:
                await self._cleanup()

    async def _relay(self, work: asyncio.Task[Encoded], gone: asyncio.Task[None], send: Send) -> None:
        """Sends output and heartbeats until the work ends or the client disconnects."""
        output = self._output
        while not work.done() and not gone.done():
            waiting: set[asyncio.Future[Any]] = {work, gone}
            if output is not None:
                waiting.add(asyncio.ensure_future(output.wait()))
            try:
                done, _ = await asyncio.wait(waiting, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for future in waiting - {work, gone}:
                    future.cancel()
            if gone.done():
                return
            frames = [] if output is None else output.pop_frames()
            if not frames and not done and not self._plain:
                frames = [self._pack({"event": "beat"}, b"")]
            for frame in frames:
                await self._send(send, frame)

    async def _conclude(
        self, work: asyncio.Task[Encoded], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Sends the end of the answer."""
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if not self._begun and (self._plain or error is not None):
            status, document, _ = (
                (200, work.result()[0], {}) if error is None else self._errors.describe(error)
            )
            await Json(document, status)(scope, receive, send)
            return
        for frame in [] if self._output is None else self._output.pop_frames():
            await self._send(send, frame)
        if error is None:
            if self._tail is not None:
                async for frame in self._tail:
                    await self._send(send, frame)
            value, payload = work.result()
            last = self._pack({"event": "result", "value": value}, payload)
        else:
            last = self._pack({"event": "error", **self._errors.describe(error)[1]}, b"")
        await self._send(send, last)
        await push(send, body(b"", more=False))

    def _report_error(self, work: asyncio.Task[Encoded]) -> None:
        """Calls `on_error` with what the work raised, and logs it if the server is at fault."""
        if work.cancelled() or (error := work.exception()) is None:
            return
        self._on_error(error)
        if not isinstance(error, (EtudeError, TimeoutError)):
            _log.error("a request failed", exc_info=error)

    async def _send(self, send: Send, frame: bytes) -> None:
        """Sends a frame. Raises ClientLeftError."""
        if not self._begun:
            headers = [(b"content-type", FRAMES.encode())]
            await push(send, {"type": "http.response.start", "status": 200, "headers": headers})
            self._begun = True
        await push(send, body(frame))
