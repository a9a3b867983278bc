"""The routes that an agent uses: OpenAI's chat completions and Anthropic's messages."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from etude.environment.recording import anthropic_format, openai_format
from etude.environment.recording.server.requests import AGENT_HEADER, recordings_of, session_of, with_body
from etude.environment.recording.service import Ask, Begun, Event
from etude.environment.recording.sessions import RecordedSession, Recordings
from etude.errors import EtudeError
from etude.kit.tasks import end_tasks
from etude.serving.application import unless_gone, until_gone
from etude.serving.describing import answering, described
from etude.serving.errors import ErrorAnswer

STREAMED = answering("application/json", "text/event-stream") | {
    529: {"description": "Overloaded, in Anthropic's words"}
}
router = APIRouter()
_log = logging.getLogger("etude.recording.server")

ErrorWriter = Callable[[BaseException], ErrorAnswer]
Write = Callable[[AsyncIterator[Event]], AsyncIterator[bytes]]
Whole = Callable[[AsyncIterator[Event]], Coroutine[Any, Any, dict[str, Any]]]


@router.post("/v1/chat/completions", responses=STREAMED, openapi_extra=described(body="application/json"))
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions."""
    session = session_of(request)
    agent, defaults = request.headers.get(AGENT_HEADER, ""), session.spec.sampling
    read = await with_body(request, lambda body: openai_format.read_chat(body, agent, defaults))
    tokenizer = recordings_of(request).renderers.tokenizer
    writer = openai_format.ChatWriter(read, f"chatcmpl-{secrets.token_hex(12)}", tokenizer)
    stream = writer.stream if read.stream else None
    return await _answer(
        request, session, read.ask, writer.whole, stream, openai_format.ERRORS.describe, _openai_event
    )


@router.post("/v1/messages", responses=STREAMED, openapi_extra=described(body="application/json"))
async def messages(request: Request) -> Response:
    """Anthropic's messages."""
    try:
        session = session_of(request)
        agent, defaults = request.headers.get(AGENT_HEADER, ""), session.spec.sampling
        read = await with_body(request, lambda body: anthropic_format.read_messages(body, agent, defaults))
        writer = anthropic_format.MessagesWriter(read, f"msg_{secrets.token_hex(12)}")
        stream = writer.stream if read.stream else None
        return await _answer(
            request,
            session,
            read.ask,
            writer.whole,
            stream,
            anthropic_format.error_document,
            _anthropic_event,
        )
    except Exception as error:
        return _refused(request, error)


@router.post("/v1/messages/count_tokens", openapi_extra=described(body="application/json"))
async def count_tokens(request: Request) -> Response:
    """Tokens of the context that a request of these messages would have."""
    try:
        session = session_of(request)
        agent, defaults = request.headers.get(AGENT_HEADER, ""), session.spec.sampling
        read = await with_body(
            request, lambda body: anthropic_format.read_messages(body, agent, defaults, counting=True)
        )
        ahead = await session.service.encode_ahead(read.ask.messages)
        num_tokens = session.map.measure(read.ask.messages, read.ask.params, ahead)
        return JSONResponse({"input_tokens": num_tokens})
    except Exception as error:
        return _refused(request, error)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that there is, under any name."""
    session_of(request)
    row = {"id": "etude", "object": "model", "type": "model", "created": 0, "owned_by": "etude"}
    row |= {"display_name": "etude", "created_at": "1970-01-01T00:00:00Z"}
    return JSONResponse({"object": "list", "data": [row], "has_more": False})


async def _answer(
    request: Request,
    session: RecordedSession,
    ask: Ask,
    whole: Whole,
    stream: Write | None,
    error_writer: ErrorWriter,
    error_event: Callable[[dict[str, Any]], bytes],
) -> Response:
    recordings = recordings_of(request)
    recordings.counts["requests"] += 1
    ahead = await session.service.encode_ahead(ask.messages)
    recordings.enter(session)
    events = session.service.answer(ask, ahead)
    try:
        begun = await anext(events)
        assert isinstance(begun, Begun), "events begin with Begun"
    except BaseException:
        recordings.leave(session)
        raise
    if stream is not None:
        return _Stream(recordings, session, events, begun, stream, error_writer, error_event)
    try:
        document = await unless_gone(request, whole(_chained([begun], events)))
    finally:
        await events.aclose()
        recordings.leave(session)
    return JSONResponse(document)


async def _chained(begun: Sequence[Event], events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    for event in begun:
        yield event
    async for event in events:
        yield event


class _Stream(Response):
    """Server-sent events of one answer. Errors that come late are an event of their own."""

    media_type = "text/event-stream"

    def __init__(
        self,
        recordings: Recordings,
        session: RecordedSession,
        events: AsyncGenerator[Event],
        begun: Event,
        write: Write,
        error_writer: ErrorWriter,
        error_event: Callable[[dict[str, Any]], bytes],
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._recordings = recordings
        self._session = session
        self._events = events
        self._begun = begun
        self._write = write
        self._error_writer = error_writer
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until the answer ends or the client leaves."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(sending, leaving)
            await self._events.aclose()
            self._recordings.leave(self._session)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _send(self, send: Send) -> None:
        try:
            first = await anext(self._events)
        except EtudeError as error:  # nothing was sent yet: clients try again by the status
            self._recordings.counts["errors"] += 1
            status, document, _ = self._error_writer(error)
            await _send_whole(send, status, document)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(_chained([self._begun, first], self._events)) as events:
                async for data in self._write(events):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            return  # the client has left
        except EtudeError as error:
            self._recordings.counts["errors"] += 1
            data = self._error_event(self._error_writer(error)[1])
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_whole(send: Send, status: int, document: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})


def _openai_event(document: dict[str, Any]) -> bytes:
    return openai_format.sse(document)


def _anthropic_event(document: dict[str, Any]) -> bytes:
    return f"event: error\ndata: {json.dumps(document)}\n\n".encode()


def _refused(request: Request, error: Exception) -> Response:
    """An error in Anthropic's shape."""
    recordings_of(request).counts["errors"] += 1
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if not isinstance(error, EtudeError):
        _log.error("a request failed", exc_info=error)
    status, document, _ = anthropic_format.error_document(error)
    return JSONResponse(document, status)
