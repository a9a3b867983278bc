"""What the routes share: the server's state, keys, bodies, conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

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
    """The state of the server that got the request."""
    return request.app.state.serving


def key_of(request: Request) -> Key:
    """The key that sends a request, as a bearer or (by Anthropic's clients) in `x-api-key`. Raises
    RefusedKeyError."""
    return state_of(request).keys.find(bearer_of(request.headers) or request.headers.get("x-api-key", ""))


def check_admin(request: Request) -> None:
    """Raises RefusedKeyError without a token, ForbiddenError for another than the administrator's."""
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
    """What `work` makes of a request's JSON object; of a large one in a thread, since a long conversation
    takes its time to parse and to encode. Raises BodyTooLargeError, UserError, what `work` raises."""
    limit_bytes = state_of(request).limits.body_bytes
    return await read_parsed(request, limit_bytes, lambda data: work(parse_body(data)))


async def data_of(request: Request) -> bytes:
    """The body of a request. Raises BodyTooLargeError."""
    return await read_body(request, state_of(request).limits.body_bytes)


def check_session_name(request: Request) -> None:
    """Raises BadRequestError for what names no conversation; which one it is matters to routers alone."""
    _named(request, SESSION_HEADER)


def pin_of(request: Request) -> str | None:
    """The policy version, by name, that all tokens of the answer must come from. Raises BadRequestError."""
    return _named(request, VERSION_HEADER)


def _named(request: Request, header: str) -> str | None:
    name = request.headers.get(header)
    if name is not None and (not name or len(name) > _MAX_NAME_CHARACTERS or not name.isprintable()):
        raise wrong(header, name[:32], f"1 to {_MAX_NAME_CHARACTERS} printable characters")
    return name


def wants_tokens(request: Request) -> bool:
    """Whether the side channel is asked for. Raises BadRequestError for extensions that there are not."""
    names = [name.strip() for name in request.headers.get(EXTENSIONS_HEADER, "").split(",") if name.strip()]
    for name in names:
        if name != "tokens":
            raise unsupported(EXTENSIONS_HEADER, name, "there is no such extension", "send: tokens")
    return bool(names)
