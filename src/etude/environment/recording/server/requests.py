"""What the routes share: the server's sessions, keys, bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from etude.environment.recording.errors import RefusedKeyError
from etude.environment.recording.live import LiveSessions, RecordedSession
from etude.environment.recording.sessions import Recordings
from etude.serving.access import bearer_of
from etude.serving.application import read_parsed
from etude.tokens.chat.fields import parse_body

T = TypeVar("T")
SESSION_HEADER = "x-etude-session"
AGENT_HEADER = "x-etude-agent"


def sessions_of(request: Request) -> LiveSessions:
    """The sessions of the server that got the request."""
    return request.app.state.sessions


def recordings_of(request: Request) -> Recordings:
    """The same, of a server that stores them."""
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
    """What `work` makes of a request's JSON object; of a large one in a thread. Raises BodyTooLargeError,
    UserError, and what `work` raises."""
    limit_bytes = sessions_of(request).limits.body_bytes
    return await read_parsed(request, limit_bytes, lambda data: work(parse_body(data)))
