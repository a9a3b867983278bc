"""The routes that an agent uses: OpenAI's chat completions and responses, and Anthropic's messages."""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.environment.recording.errors import ERRORS
from etude.environment.recording.live import RecordedSession
from etude.environment.recording.server.requests import AGENT_HEADER, session_of, sessions_of, with_body
from etude.environment.recording.service import Ask
from etude.errors import EtudeError
from etude.serving.answers import EventStream, Sending
from etude.serving.application import unless_gone
from etude.serving.describing import answering, described
from etude.serving.errors import ErrorAnswer
from etude.tokens.chat.answers import encode_event, written, written_whole
from etude.tokens.chat.dialects import DIALECTS, MESSAGES, Dialect, respell_error
from etude.tokens.chat.requests import ChatRequest

STREAMED = answering("application/json", "text/event-stream") | {
    529: {"description": "Overloaded, in Anthropic's words"}
}
_JSON_BODY = described(body="application/json")
_MODEL = "etude"
router = APIRouter()
_log = logging.getLogger("etude.recording.server")


def _add_dialect(dialect: Dialect) -> None:
    async def answer(request: Request) -> Response:
        """The next answer of a conversation."""
        session, sessions = session_of(request), sessions_of(request)
        with contextlib.ExitStack() as held:  # until the answer is sent, though it is sent as it is sampled
            held.enter_context(sessions.using(session))
            return await _answer(request, session, dialect, held)

    router.add_api_route(
        dialect.path,
        answer,
        methods=["POST"],
        name=dialect.name,
        responses=STREAMED,
        openapi_extra=_JSON_BODY,
    )


for _dialect in DIALECTS:
    _add_dialect(_dialect)


@router.post("/v1/messages/count_tokens", openapi_extra=_JSON_BODY)
async def count_tokens(request: Request) -> Response:
    """Tokens of the context that a request of these messages would have, in Anthropic's words."""
    session, sessions = session_of(request), sessions_of(request)
    with sessions.using(session):
        _, ask = await _read(request, MESSAGES, session, max_tokens=1)
        ahead = await session.service.encode_ahead(ask.messages)
        return JSONResponse({"input_tokens": session.map.measure(ask.messages, ask.params, ahead)})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that there is, under any name."""
    session_of(request)
    row = {"id": _MODEL, "object": "model", "type": "model", "created": 0, "owned_by": "etude"}
    row |= {"display_name": _MODEL, "created_at": "1970-01-01T00:00:00Z"}
    return JSONResponse({"object": "list", "data": [row], "has_more": False})


async def _read(
    request: Request, dialect: Dialect, session: RecordedSession, **more: int
) -> tuple[ChatRequest, Ask]:
    """A request, and what is asked of the sampler. Fields that nobody knows are passed over: a client that
    cannot be changed may send any. Calls are served whole, so that a malformed one stays text."""
    agent = request.headers.get(AGENT_HEADER, "")
    sampling = session.spec.sampling

    def read_body(body: dict[str, Any]) -> ChatRequest:
        return dialect.read(sampling.that_count({**more, **body}), agent, strict=False)

    read = await with_body(request, read_body)
    rules = replace(read.rules, whole_calls=True)
    return read, Ask(read.messages, sampling.params(read.sampling), rules, read.sampling.seed, read.stream)


async def _answer(
    request: Request, session: RecordedSession, dialect: Dialect, held: contextlib.ExitStack
) -> Response:
    read, ask = await _read(request, dialect, session)
    sessions = sessions_of(request)
    sessions.counts["requests"] += 1
    ahead = await session.service.encode_ahead(ask.messages)
    sessions.check_live(session)  # it may have ended while the request was read
    num_prompt_tokens, events = session.service.start(ask, ahead)
    tokenizer, model = sessions.renderers.tokenizer, read.model or _MODEL
    writer = dialect.writer(read, secrets.token_hex(12), num_prompt_tokens, tokenizer, model)

    def describe(error: Exception) -> ErrorAnswer:
        sessions.counts["errors"] += 1
        if not isinstance(error, EtudeError):
            _log.error("a request failed", exc_info=error)
        return respell_error(dialect.path, error, ERRORS.describe(error))

    if read.stream:
        sent = held.pop_all()
        return EventStream(
            Sending(written(events, writer), describe, encode_event, lambda status: sent.close())
        )
    return JSONResponse(await unless_gone(request, written_whole(events, writer)))
