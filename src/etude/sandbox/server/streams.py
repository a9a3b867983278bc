"""Bodies in and out: bounded requests, and answers that take long, with signs of life in between.

A `LongAnswer` waits for: the work, the client's departure, output, the next beat. A client that leaves
cancels the work (a command ends), unless the work must be finished (a snapshot is). Nothing piles up:
output that the client does not take in time is dropped and counted, and a client that takes nothing at
all is gone after `STALL_S`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError, UserError
from etude.sandbox.inside.frames import FrameError, Header, Unpacker, pack
from etude.sandbox.wire_types import BEAT_S, FRAMES, STATUSES, Encoded, encode_error
from etude.serving.application import STALL_S, Json, read_body, until_gone
from etude.serving.errors import OwnErrors

_ERRORS = OwnErrors(STATUSES, encode_error)
_log = logging.getLogger("etude.sandbox.server")

BUFFER_BYTES = 4 << 20
"""Output of one command that waits for its client; what comes beyond it is dropped."""

Work = Coroutine[Any, Any, Encoded]


class OutputBuffer:
    """Frames on their way from a command to its client; bounded. `put` is an `OnOutput`."""

    def __init__(self, limit_bytes: int = BUFFER_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: deque[tuple[int, bytearray]] = deque()
        self._held_bytes = 0
        self._dropped_bytes = 0
        self._something = asyncio.Event()
        self.finished = asyncio.Event()
        """Set when no more output comes, or nobody wants it."""

    def put(self, fd: int, data: bytes) -> None:
        """Takes output in; what does not fit is dropped."""
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

    def finish(self) -> None:
        """See `finished`."""
        self.finished.set()
        self._something.set()

    async def wait(self) -> None:
        """Returns when there is something to take, or the end."""
        await self._something.wait()

    def take(self) -> list[bytes]:
        """The frames of everything that is held."""
        frames = [pack({"event": "output", "fd": fd}, bytes(data)) for fd, data in self._pieces]
        if self._dropped_bytes:
            frames.append(pack({"event": "dropped", "num_bytes": self._dropped_bytes}))
        self._pieces.clear()
        self._held_bytes = self._dropped_bytes = 0
        if not self.finished.is_set():
            self._something.clear()
        return frames


class LongAnswer(Response):
    """Runs `work` and answers with frames, the last of them its result or its error."""

    def __init__(
        self,
        work: Work,
        output: OutputBuffer | None = None,
        finish: Callable[[asyncio.Task[Encoded]], object] | None = None,
        plain: bool = False,
        first: bytes | None = None,
        tail: AsyncGenerator[bytes, None] | None = None,
        cleanup: Callable[[], Awaitable[None]] | None = None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`finish`: takes over the work whose result no client took; without it the work is cancelled.

        `plain`: the client reads JSON, not frames; it gets no signs of life. `first`: a frame that is sent
        at once. `tail`: frames between the end of the work and its result. `cleanup` is called at the end.
        """
        super().__init__()
        self._work = work
        self._output = output
        self._finish = finish
        self._plain = plain
        self._first = first
        self._tail = tail
        self._cleanup = cleanup
        self._on_error = on_error
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer as ASGI sends it."""
        work = asyncio.ensure_future(self._work)
        work.add_done_callback(self._note_error)
        gone = asyncio.ensure_future(until_gone(receive))
        delivered = False
        try:
            if self._first is None or await self._send(send, self._first):
                await self._relay(work, gone, send)
            if work.done() and not gone.done():
                delivered = await self._conclude(work, scope, receive, send)
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
        """Sends output and beats until the work or the client has ended."""
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
            frames = [] if output is None else output.take()
            if not frames and not done and not self._plain:
                frames = [pack({"event": "beat"})]
            for frame in frames:
                if not await self._send(send, frame):
                    return

    async def _conclude(
        self, work: asyncio.Task[Encoded], scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Sends the end of the answer. False if the client did not take it."""
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if not self._begun and (self._plain or error is not None):
            status, body, _ = (200, work.result()[0], {}) if error is None else _ERRORS.describe(error)
            answer = Json(body, status)
            await answer(scope, receive, send)
            return True
        for frame in [] if self._output is None else self._output.take():
            if not await self._send(send, frame):
                return False
        if error is None:
            if self._tail is not None:
                async for frame in self._tail:
                    if not await self._send(send, frame):
                        return False
            value, payload = work.result()
            last = pack({"event": "result", "value": value}, payload)
        else:
            last = pack({"event": "error", "error": encode_error(error)})
        if not await self._send(send, last):
            return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    def _note_error(self, work: asyncio.Task[Encoded]) -> None:
        """The error goes to the client if there still is one, and to the log if the server is at fault."""
        if work.cancelled() or (error := work.exception()) is None:
            return
        self._on_error(error)
        if not isinstance(error, (EtudeError, TimeoutError)):
            _log.error("a sandbox call failed", exc_info=error)

    async def _send(self, send: Send, frame: bytes) -> bool:
        """False if the client takes nothing any longer."""
        try:
            async with asyncio.timeout(STALL_S):
                if not self._begun:
                    headers = [(b"content-type", FRAMES.encode())]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    self._begun = True
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except (TimeoutError, OSError):
            return False
        return True


async def read_request(request: Request, limit_bytes: int) -> tuple[Any, bytes]:
    """A request's header and payload: one frame, or JSON alone. Raises UserError for anything else."""
    body = await read_body(request, limit_bytes)
    try:
        if request.headers.get("content-type", "").startswith(FRAMES):
            ((header, payload),) = Unpacker().feed(body)
            return header, payload
        return json.loads(body) if body else {}, b""
    except (FrameError, ValueError, RecursionError) as error:
        raise UserError(
            f"the body is no request: {error}", field="body", fix=f"send JSON, or one frame as {FRAMES}"
        ) from error


async def frames_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[Header, bytes]]:
    """The frames in a stream of bytes. Raises UserError for what is none."""
    unpacker = Unpacker()
    async for chunk in chunks:
        try:
            frames = unpacker.feed(chunk)
        except FrameError as error:
            raise UserError(f"the body holds no frames: {error}", field="body", fix="send frames") from error
        for frame in frames:
            yield frame


def query(request: Request) -> dict[str, str]:
    """The query's fields. File names of any bytes come through, lone surrogates too."""
    text = request.scope["query_string"].decode("latin-1")
    return dict(parse_qsl(text, keep_blank_values=True, errors="surrogatepass"))
