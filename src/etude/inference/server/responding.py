"""Answers over HTTP: one document, or a stream of events; both end the request when the client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError, UserError
from etude.inference.headers import SIDE_CHANNEL_HEADER
from etude.inference.server.answering import Event
from etude.inference.server.documents import SSE_END, sse
from etude.inference.server.errors import ERRORS
from etude.inference.server.side_channel import SIDE_CHANNEL_PATH
from etude.inference.server.state import LiveRequest, ServerState
from etude.kit.tasks import end_tasks
from etude.serving.application import CLIENT_LEFT, unless_gone, until_gone

_log = logging.getLogger("etude.inference.server")


def describe(state: ServerState, error: Exception) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, document and headers; defects of ours are logged."""
    if not isinstance(error, UserError):
        state.metrics.count("etude_serve_engine_failures")
    if not isinstance(error, EtudeError):
        _log.error("a request failed", exc_info=error)
    return ERRORS.describe(error)


async def respond(request: Request, live: LiveRequest, endpoint: str, stream: bool) -> Response:
    """The answer to a request that has begun. Raises what the sampler raises before the first event."""
    headers: dict[str, str] = {}
    if live.asked.with_tokens:
        headers[SIDE_CHANNEL_HEADER] = f"{SIDE_CHANNEL_PATH}/{live.answer.id}"
    if stream:
        return _EventStream(live, endpoint, headers)
    try:
        document = await unless_gone(request, _whole(live))
    finally:
        live.leave()
    live.state.metrics.count("etude_serve_requests", endpoint=endpoint, status="200")
    return JSONResponse(document, headers=headers)


async def _whole(live: LiveRequest) -> dict[str, Any]:
    events = live.events()
    try:
        async for event in events:
            live.answer.take(event)
    finally:
        await events.aclose()
    return live.answer.whole()


class _EventStream(Response):
    """Server-sent events of one answer. Its status waits for the first tokens; an error that comes later is
    an event of its own, after which the stream ends without `[DONE]`."""

    media_type = "text/event-stream"

    def __init__(self, live: LiveRequest, endpoint: str, headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._live = live
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answer ends or the client leaves."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            status = sending.result() if sending.done() else CLIENT_LEFT
            self._live.state.metrics.count(
                "etude_serve_requests", endpoint=self._endpoint, status=str(status)
            )
        finally:
            await end_tasks(sending, leaving)
            self._live.leave()

    async def _send(self, send: Send) -> int:
        """Sends everything; the status that was sent."""
        events = self._live.events()
        try:
            try:
                first = await anext(events)
            except Exception as error:  # nothing was sent yet: clients try again by the status
                return await self._refuse(send, error)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send, first, events)
        except OSError:
            return CLIENT_LEFT
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200

    async def _send_events(self, send: Send, first: Event, events: AsyncGenerator[Event]) -> None:
        answer = self._live.answer
        try:
            await _push(send, answer.take(first))
            async for event in events:
                await _push(send, answer.take(event))
        except OSError:
            raise
        except Exception as error:
            await _push(send, [describe(self._live.state, error)[1]])
            return
        await _push(send, answer.end(), SSE_END)

    async def _refuse(self, send: Send, error: Exception) -> int:
        status, document, headers = describe(self._live.state, error)
        listed = [(b"content-type", b"application/json")]
        listed += [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": listed})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})
        return status


async def _push(send: Send, documents: list[dict[str, Any]], rest: bytes = b"") -> None:
    data = b"".join([*(sse(document) for document in documents), rest])
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
