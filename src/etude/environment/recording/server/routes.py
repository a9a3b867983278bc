"""The routes of agents (OpenAI's chat completions and responses, Anthropic's messages) and of the trainer, by
which sessions begin, are rewarded and end. An agent's key opens none of the trainer's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.environment.names import check_run_name, check_task_name
from etude.environment.recording.live import (
    BusyError,
    LiveSessions,
    NoSuchSessionError,
    RecordedSession,
    RecordingLimits,
    RefusedKeyError,
    SessionEndedError,
)
from etude.environment.recording.service import Ask
from etude.environment.recording.sessions import Recordings
from etude.environment.recording.spec import SamplingDefaults, SessionSpec
from etude.errors import EtudeError, StoreError, UserError
from etude.records import RewardBreakdown, SamplingParams, Status, TrajectoryId
from etude.serving.access import AccessError, bearer_of
from etude.serving.answers import EventStream, Sending
from etude.serving.application import read_parsed, unless_disconnected
from etude.serving.describing import answering, described
from etude.serving.errors import BodyTooLargeError, ErrorAnswer, OpenAIErrors
from etude.tokens.chat.answers import collect_answers, encode_event, stream_answers
from etude.tokens.chat.dialects import DIALECTS, MESSAGES, Dialect, respell_error
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import flag, integer, number, parse_body, text, unsupported, wrong
from etude.tokens.chat.requests import ChatRequest

T = TypeVar("T")
SESSION_HEADER = "x-etude-session"
AGENT_HEADER = "x-etude-agent"
STREAMED = answering("application/json", "text/event-stream") | {
    529: {"description": "Overloaded, in Anthropic's words"}
}
_JSON_BODY = described(body="application/json")
_MODEL = "etude"
_NUMBERS = ("epoch", "group", "index")
_SPEC_FIELDS = {*_NUMBERS, "run", "task", "group_size", "consent", "keep_thinking", "sampling", "metadata"}
_SAMPLING_FIELDS = {"temperature", "max_tokens"}
_METADATA_BYTES = 1 << 16
_MAX_REWARD = 1e300
ERRORS = OpenAIErrors(
    (
        (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
        (AccessError, 401, "authentication_error", "foreign_name"),
        (RefusedKeyError, 401, "authentication_error", "invalid_api_key"),
        (NoSuchSessionError, 404, "invalid_request_error", "session_not_found"),
        (SessionEndedError, 410, "invalid_request_error", "session_ended"),
        (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
        (BusyError, 429, "rate_limit_error", "rate_limit_exceeded"),
        (UserError, 400, "invalid_request_error", None),
        (EtudeError, 503, "server_error", None),
    )
)
"""Errors of a recording endpoint in OpenAI's terms, from which other dialects derive theirs."""
agents, trainers = APIRouter(), APIRouter()
_log = logging.getLogger("etude.recording.server")


def sessions_of(request: Request) -> LiveSessions:
    """The sessions of the server that received the request."""
    return request.app.state.sessions


def recordings_of(request: Request) -> Recordings:
    """The same, for a server that stores sessions."""
    return request.app.state.sessions


def key_of(request: Request) -> str:
    """The key of a request: `x-api-key`, or a bearer; empty if there is none."""
    return request.headers.get("x-api-key") or bearer_of(request.headers)


def tenant_of(request: Request) -> str:
    """The tenant that sent a request. Raises RefusedKeyError."""
    key = key_of(request)
    if not key:
        raise RefusedKeyError("the token is missing", field="Authorization", fix="send a tenant's token")
    return recordings_of(request).tenant_of(key)


def session_of(request: Request) -> RecordedSession:
    """The session that an agent's request belongs to."""
    path_id = request.path_params.get("session")
    header_id = request.headers.get(SESSION_HEADER)
    session = sessions_of(request).find_for_agent(path_id, header_id, key_of(request))
    request.state.session = session
    return session


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises BodyTooLargeError and UserError."""
    return await with_body(request, lambda body: body)


async def with_body(request: Request, work: Callable[[dict[str, Any]], T]) -> T:
    """The result of `work` on a request's JSON object; for a large one in a thread. Raises BodyTooLargeError,
    UserError, and what `work` raises."""
    limit_bytes = sessions_of(request).limits.body_bytes
    return await read_parsed(request, limit_bytes, lambda data: work(parse_body(data)))


# ---- agents --------------------------------------------------------------------------------


def _add_dialect(dialect: Dialect) -> None:
    async def answer(request: Request) -> Response:
        """The next answer of a conversation."""
        session, sessions = session_of(request), sessions_of(request)
        with contextlib.ExitStack() as held:  # until the answer is sent, though it is sent as it is sampled
            held.enter_context(sessions.using(session))
            return await _answer(request, session, dialect, held)

    agents.add_api_route(
        dialect.path,
        answer,
        methods=["POST"],
        name=dialect.name,
        responses=STREAMED,
        openapi_extra=_JSON_BODY,
    )


for _dialect in DIALECTS:
    _add_dialect(_dialect)


@agents.post("/v1/messages/count_tokens", openapi_extra=_JSON_BODY)
async def count_tokens(request: Request) -> Response:
    """Number of context tokens that a request with these messages would have, in Anthropic's format."""
    session, sessions = session_of(request), sessions_of(request)
    with sessions.using(session):
        _, ask = await _read(request, MESSAGES, session, max_tokens=1)
        history = await session.service.encode(ask.messages)
        return JSONResponse({"input_tokens": session.map.measure(history, ask.params)})


@agents.get("/v1/models")
async def models(request: Request) -> Response:
    """The only model, under any name."""
    session_of(request)
    row = {"id": _MODEL, "object": "model", "type": "model", "created": 0, "owned_by": "etude"}
    row |= {"display_name": _MODEL, "created_at": "1970-01-01T00:00:00Z"}
    return JSONResponse({"object": "list", "data": [row], "has_more": False})


async def _read(
    request: Request, dialect: Dialect, session: RecordedSession, **more: int
) -> tuple[ChatRequest, Ask]:
    """Parses a request, for the dialect and for the sampler. Unknown fields are ignored, because a client
    that cannot be changed may send any. Calls are served whole, so that a malformed one stays text."""
    agent = request.headers.get(AGENT_HEADER, "")
    sampling = session.spec.sampling

    def read_body(body: dict[str, Any]) -> ChatRequest:
        return dialect.read(sampling.without_ignored({**more, **body}), agent, strict=False)

    read = await with_body(request, read_body)
    rules = replace(read.rules, whole_calls=True)
    return read, Ask(read.messages, sampling.params(read.sampling), rules, read.sampling.seed, read.stream)


async def _answer(
    request: Request, session: RecordedSession, dialect: Dialect, held: contextlib.ExitStack
) -> Response:
    read, ask = await _read(request, dialect, session)
    sessions = sessions_of(request)
    sessions.counts["requests"] += 1
    history = await session.service.encode(ask.messages)
    sessions.check_live(session)  # it may have ended while the request was read
    num_prompt_tokens, events = session.service.start(ask, history)
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
            Sending(stream_answers(events, writer), describe, encode_event, lambda status: sent.close())
        )
    return JSONResponse(await unless_disconnected(request, collect_answers(events, writer)))


# ---- trainers ------------------------------------------------------------------------------


@trainers.post("/sessions", status_code=201, openapi_extra=_JSON_BODY)
async def create(request: Request) -> Response:
    """Begins a session; returns its id, base URLs and key."""
    tenant, recordings = tenant_of(request), recordings_of(request)
    spec = _spec(await body_of(request), recordings.limits)
    session = recordings.create(tenant, spec)
    try:
        await session.journal.sync()
    except StoreError:  # else nobody knows its id, and its trajectory cannot be begun again
        await recordings.delete(tenant, session.id)
        raise
    base = f"{str(request.base_url).rstrip('/')}/s/{session.id}"
    row = {"id": session.id, "key": session.key, "openai_base_url": f"{base}/v1", "anthropic_base_url": base}
    return JSONResponse({**row, "trajectory": str(spec.trajectory_id)}, 201)


@trainers.get("/sessions/{session_id}")
async def get(request: Request, session_id: str) -> Response:
    """The description of a session."""
    return JSONResponse(recordings_of(request).find_owned(tenant_of(request), session_id).describe())


@trainers.post("/sessions/{session_id}/reward", openapi_extra=_JSON_BODY)
async def reward(request: Request, session_id: str) -> Response:
    """Sets the reward; a later one replaces it."""
    recordings = recordings_of(request)
    session = recordings.find_owned(tenant_of(request), session_id)
    given = _reward(await body_of(request))
    await recordings.set_reward(session, given)
    return JSONResponse({"reward": given.total})


@trainers.post("/sessions/{session_id}/finish", openapi_extra=_JSON_BODY)
async def finish(request: Request, session_id: str) -> Response:
    """Stores the trajectory; it is durable when the answer is sent."""
    tenant, recordings = tenant_of(request), recordings_of(request)
    body = await body_of(request)
    status = body.get("status", Status.DONE.value)
    if status not in list(Status):
        raise wrong("status", status, "one of " + ", ".join(Status))
    given, parsed = body.get("reward"), None
    if given is not None:
        parsed = _reward(given if isinstance(given, dict) else {"task": given})
    cause = text(body.get("cause", ""), "cause")
    return JSONResponse(await recordings.finish(tenant, session_id, Status(status), cause, parsed))


@trainers.delete("/sessions/{session_id}", status_code=204)
async def delete(request: Request, session_id: str) -> Response:
    """Ends a session without storing it."""
    await recordings_of(request).delete(tenant_of(request), session_id)
    return Response(status_code=204)


def _spec(body: dict[str, Any], limits: RecordingLimits) -> SessionSpec:
    unknown = sorted(body.keys() - _SPEC_FIELDS)
    if unknown:
        raise unsupported(unknown[0], "", f"no such field; there are {', '.join(sorted(_SPEC_FIELDS))}")
    numbers = {name: integer(body, name, 0) or 0 for name in _NUMBERS}
    run, task = text(body.get("run", "recording"), "run"), text(body.get("task"), "task")
    identity = TrajectoryId(check_run_name(run), check_task_name(task), **numbers)
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict) or len(json.dumps(metadata)) > _METADATA_BYTES:
        raise wrong("metadata", metadata, f"an object of at most {_METADATA_BYTES} bytes")
    return SessionSpec(
        trajectory_id=identity,
        group_size=integer(body, "group_size", 1) or 0,
        consent=text(body.get("consent", "synthetic"), "consent"),
        keep_thinking=flag(body, "keep_thinking", True),
        sampling=_sampling(body.get("sampling"), limits),
        metadata=metadata,
    )


def _sampling(value: object, limits: RecordingLimits) -> SamplingDefaults:
    if value is None:
        return SamplingDefaults(None, limits.default_max_tokens)
    if not isinstance(value, dict):
        raise wrong("sampling", value, "an object")
    unknown = sorted(value.keys() - _SAMPLING_FIELDS)
    if unknown:
        raise unsupported(f"sampling.{unknown[0]}", "", "only temperature and max_tokens can be fixed")
    limit = integer(value, "max_tokens", 1) or limits.default_max_tokens
    fixed = SamplingParams(number(value, "temperature", 1.0, 0.0, 2.0), max_tokens=limit)
    return SamplingDefaults(fixed, limit)


def _reward(body: dict[str, Any]) -> RewardBreakdown:
    terms = body.get("terms") or {}
    if not isinstance(terms, dict):
        raise wrong("terms", terms, "an object of numbers")
    rows = {str(name): _finite(value, f"terms.{name}") for name, value in terms.items()}
    given = RewardBreakdown(
        _finite(body.get("task"), "task"), rows, text(body.get("version", "1"), "version")
    )
    _finite(given.total, "terms")  # each is finite, and their sum need not be
    return given


def _finite(value: object, field: str) -> float:
    wanted = "a number between -1e300 and 1e300"
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_REWARD:
        raise wrong(field, value if isinstance(value, float | None) else type(value).__name__, wanted)
    return float(value)
