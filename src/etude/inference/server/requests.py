"""Request helpers of the routes: server state, API keys, bodies and headers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import HTTPConnection

from etude.inference.headers import EXTENSIONS_HEADER, SESSION_HEADER, VERSION_HEADER
from etude.inference.server.errors import ForbiddenError, RefusedKeyError
from etude.inference.server.limits import Key
from etude.inference.server.state import ServerState
from etude.serving.access import bearer_of, is_token
from etude.serving.application import read_body, read_parsed
from etude.tokens.chat.fields import parse_body, unsupported, wrong

_MAX_NAME_CHARACTERS = 256
T = TypeVar("T")


def state_of(request: Request) -> ServerState:
    """The state of the server."""
    return request.app.state.serving


def count_answer(connection: HTTPConnection, status: int) -> None:
    """Counts an answer, by the tag of its route."""
    (endpoint,) = getattr(connection.scope.get("route"), "tags", None) or ["other"]
    state: ServerState = connection.app.state.serving
    state.metrics.count("etude_serve_requests", endpoint=endpoint, status=str(status))


def key_of(request: Request) -> Key:
    """The key of a request, sent as a bearer token or (by Anthropic's clients) in `x-api-key`. Raises
    RefusedKeyError."""
    return state_of(request).keys.find(bearer_of(request.headers) or request.headers.get("x-api-key", ""))


def check_admin(request: Request) -> None:
    """Raises RefusedKeyError without a token, ForbiddenError if it is not the administrator's."""
    token, wanted = bearer_of(request.headers), state_of(request).admin_token
    if not wanted:
        raise ForbiddenError(
            "this server has no administrator",
            field="Authorization",
            fix="start it with --admin-token-file",
        )
    if not token:
        raise RefusedKeyError("the administrator's token is missing", field="Authorization")
    if not is_token(token, wanted):
        raise ForbiddenError("not the administrator's token", field="Authorization")


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises BodyTooLargeError and UserError."""
    return await with_body(request, lambda body: body)


async def with_body(request: Request, work: Callable[[dict[str, Any]], T]) -> T:
    """Parses a request's JSON object and returns `work` of it; for large bodies in a thread, since long
    conversations take time to parse and encode. Raises BodyTooLargeError, UserError, what `work` raises."""
    limit_bytes = state_of(request).limits.body_bytes
    return await read_parsed(request, limit_bytes, lambda data: work(parse_body(data)))


async def data_of(request: Request) -> bytes:
    """The body of a request. Raises BodyTooLargeError."""
    return await read_body(request, state_of(request).limits.body_bytes)


def check_session_name(request: Request) -> None:
    """Raises BadRequestError for a malformed session name. Only routers use the name itself."""
    _named(request, SESSION_HEADER)


def pin_of(request: Request) -> str | None:
    """The name of the policy version that the request is pinned to, if any. Raises BadRequestError."""
    return _named(request, VERSION_HEADER)


def _named(request: Request, header: str) -> str | None:
    name = request.headers.get(header)
    if name is not None and (not name or len(name) > _MAX_NAME_CHARACTERS or not name.isprintable()):
        raise wrong(header, name[:32], f"1 to {_MAX_NAME_CHARACTERS} printable characters")
    return name


def wants_tokens(request: Request) -> bool:
    """Whether the request asks for the side channel. Raises BadRequestError for unknown extensions."""
    names = [name.strip() for name in request.headers.get(EXTENSIONS_HEADER, "").split(",") if name.strip()]
    for name in names:
        if name != "tokens":
            raise unsupported(EXTENSIONS_HEADER, name, "there is no such extension", "send: tokens")
    return bool(names)
