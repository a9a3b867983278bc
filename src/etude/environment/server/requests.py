"""What the routes share: the host, the tenant, the session of a path, the fields of each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from etude.environment.server.host import Held, SessionHost
from etude.sandbox.inside.frames import Unpacker
from etude.sandbox.server.requests import check_numbers, long_answer
from etude.serving.access import AccessError, bearer_of, find_token
from etude.serving.application import read_request
from etude.serving.long_answers import LongAnswer, OutputBuffer, Work
from etude.serving.messages import FRAMES, Fields, checked, strings

_NONE = type(None)
LOCAL_TENANT = "local"
"""Whose sessions are where no tokens are asked for."""

CREATE: Fields = {
    "task": (str, dict, _NONE),
    "files": (dict, _NONE),
    "directory": (str, _NONE),
    "repository": (str, _NONE),
    "commit": (str, _NONE),
    "snapshot": (str, _NONE),
    "fork": (dict, _NONE),
    "instruction": (str, _NONE),
    "test_paths": (list, _NONE),
    "resources": (dict, _NONE),
    "network": (dict, _NONE),
    "idle_s": (float, _NONE),
}
FORK_OF: Fields = {"session": (str,), "turn": (int, _NONE)}
TURN: Fields = {"calls": (list,), "turn": (int, _NONE), "known": (dict, _NONE)}
ARCHIVE: Fields = {"path": (str,), "text": (str,)}
SUBMIT: Fields = {"status": (str, _NONE), "cause": (str, _NONE)}
FORK: Fields = {"count": (int, _NONE), "turn": (int, _NONE)}
NOTHING: Fields = {}


# Coroutines, all three: FastAPI runs plain functions in threads, which costs a millisecond and a race.


async def host_of(connection: HTTPConnection) -> SessionHost:
    """The sessions of the server that got the request."""
    return connection.app.state.host


async def tenant_of(connection: HTTPConnection) -> str:
    """Whose request it is. Raises AccessError."""
    tokens: Mapping[str, str] = connection.app.state.tokens
    if not tokens:
        return LOCAL_TENANT
    given = bearer_of(connection.headers) or connection.path_params.get("token", "")
    found = find_token(tokens, given)
    if found is None:
        raise AccessError(
            "the token is missing or wrong", field="token", fix="send a token of the server's as a bearer"
        )
    return found


Host = Annotated[SessionHost, Depends(host_of)]
Tenant = Annotated[str, Depends(tenant_of)]


async def _held(session_id: str, host: Host, tenant: Tenant) -> Held:
    return host.find(tenant, session_id)


Box = Annotated[Held, Depends(_held)]
"""The session of the path."""


async def fields_of(request: Request, fields: Fields) -> dict[str, Any]:
    """The checked fields of a request, those that are null left out. Raises UserError."""
    limits = (await host_of(request)).limits
    raw, _ = await read_request(request, limits.body_bytes, Unpacker().feed)
    named = {name: value for name, value in checked(raw, fields).items() if value is not None}
    if "test_paths" in named:
        named["test_paths"] = tuple(strings(named["test_paths"], "test_paths"))
    check_numbers(named, "turn", "idle_s", "count")
    return named


def wants_frames(request: Request) -> bool:
    """Whether the client reads frames; others get JSON."""
    return FRAMES in request.headers.get("accept", "")


def long(request: Request, work: Work, output: OutputBuffer | None = None) -> LongAnswer:
    """The answer of a request that may take long. What was begun is finished though the client leaves."""
    host: SessionHost = request.app.state.host
    plain = not wants_frames(request)
    return long_answer(work, output, host.in_background, plain=plain, on_error=host.note_error)
