"""Streamed answers: server-sent events, whose HTTP status is decided when the first event is ready.

    pieces --first--> 200 --piece--> ... --piece--> end
       |                                 |
       +- error: its own status          +- error: a last event of its own

The work ends when the client disconnects or stops reading.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from etude.kit.tasks import end_tasks
from etude.serving.application import CLIENT_LEFT, STALL_S, until_disconnected
from etude.serving.errors import ErrorAnswer


@dataclass(frozen=True, slots=True)
class Sending:
    """How the events of one answer are sent."""

    pieces: AsyncGenerator[bytes]
    """The encoded events; closed when the client disconnects."""
    describe: Callable[[Exception], ErrorAnswer]
    error_event: Callable[[dict[str, Any]], bytes]
    """Encodes an error's document as an event."""
    ended: Callable[[int], None]
    """Called once at the end, with the HTTP status that was sent."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


class EventStream(Response):
    """Server-sent events of one answer."""

    media_type = "text/event-stream"

    def __init__(self, sending: Sending) -> None:
        super().__init__(headers={"cache-control": "no-cache", **sending.headers})
        del self.headers["content-length"]
        self._sending = sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answer ends or the client disconnects."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(until_disconnected(receive))
        status = CLIENT_LEFT
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                status = sending.result()
        finally:
            await end_tasks(sending, leaving)
            await self._sending.pieces.aclose()
            self._sending.ended(status)

    async def _send(self, send: Send) -> int:
        """Sends everything; returns the HTTP status that was sent."""
        pieces = self._sending.pieces
        try:
            try:
                first = await anext(pieces)
            except Exception as error:  # nothing was sent yet: clients decide by the status whether to retry
                return await self._refuse(send, error)
            await push(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await push(send, body(first))
            try:
                async for piece in pieces:
                    await push(send, body(piece))
            except ClientLeftError:
                raise
            except Exception as error:
                await push(send, body(self._sending.error_event(self._sending.describe(error)[1])))
            await push(send, body(b"", more=False))
        except ClientLeftError:
            return CLIENT_LEFT
        return 200

    async def _refuse(self, send: Send, error: Exception) -> int:
        status, document, headers = self._sending.describe(error)
        listed = [(b"content-type", b"application/json")]
        listed += [(name.encode(), value.encode()) for name, value in headers.items()]
        await push(send, {"type": "http.response.start", "status": status, "headers": listed})
        await push(send, body(json.dumps(document).encode(), more=False))
        return status


class ClientLeftError(Exception):
    """The client has disconnected, or has read nothing for `STALL_S`."""


def body(data: bytes, more: bool = True) -> Message:
    """A piece of an answer's body; not `more`: the last one."""
    return {"type": "http.response.body", "body": data, "more_body": more}


async def push(send: Send, message: Message) -> None:
    """Sends a message by ASGI. Raises ClientLeftError."""
    try:
        async with asyncio.timeout(STALL_S):
            await send(message)
    except OSError as error:  # TimeoutError is one
        raise ClientLeftError from error
