"""Answers over HTTP: one document, or a stream of events; both end the request when the client leaves."""

from __future__ import annotations

import logging

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from etude.errors import EtudeError, UserError
from etude.inference.headers import SIDE_CHANNEL_HEADER
from etude.inference.server.errors import ERRORS
from etude.inference.server.side_channel import SIDE_CHANNEL_PATH
from etude.inference.server.state import LiveRequest
from etude.serving.answers import EventStream, Sending
from etude.serving.application import unless_gone
from etude.serving.errors import ErrorAnswer
from etude.tokens.chat.answers import encode_event, written, written_whole
from etude.tokens.chat.dialects import respell_error

_log = logging.getLogger("etude.inference.server")


async def respond(request: Request, live: LiveRequest, endpoint: str, stream: bool) -> Response:
    """The answer to a request that has begun. Raises what the sampler raises before the first event."""
    headers: dict[str, str] = {}
    if live.asked.with_tokens:
        headers[SIDE_CHANNEL_HEADER] = f"{SIDE_CHANNEL_PATH}/{live.answer.writer.id}"
    metrics = live.state.metrics

    def describe(error: Exception) -> ErrorAnswer:
        """Status, document and headers; defects of ours are logged."""
        if not isinstance(error, UserError):
            metrics.count("etude_serve_engine_failures")
        if not isinstance(error, EtudeError):
            _log.error("a request failed", exc_info=error)
        return respell_error(request.url.path, error, ERRORS.describe(error))

    def ended(status: int) -> None:
        live.leave()
        metrics.count("etude_serve_requests", endpoint=endpoint, status=str(status))

    events = live.events()
    if stream:
        return EventStream(
            Sending(written(events, live.answer.writer), describe, encode_event, ended, headers)
        )
    try:
        document = await unless_gone(request, written_whole(events, live.answer.writer))
    finally:
        live.leave()
    ended(200)
    return JSONResponse(document, headers=headers)
