"""The base application of every HTTP server; each server adds its own routes.

request -> measured -> Host and Origin checked -> route -> answer
                               |                    |
                               +------ errors ------+--> one shape, one table of statuses
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.params import Depends as Dependency
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import etude
from etude.errors import EtudeError, UserError
from etude.kit.tasks import off_loop, unless
from etude.serving.access import AccessError, check_bearer, check_names
from etude.serving.errors import BodyTooLargeError, ErrorAnswer, ErrorShape, RouteError
from etude.serving.json_bodies import parse_json
from etude.serving.messages import FRAMES
from etude.serving.metrics import Metrics

T = TypeVar("T")
CLIENT_LEFT = 499
STALL_S = 60.0
"""A client that sends or receives no byte for so long is treated as disconnected."""

_UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"description": "Not now", "content": {"application/json": {}}}
}

OnError = Callable[[HTTPConnection, Exception, int], None]
"""Called with every error and its status before it is answered, to be counted."""
Respell = Callable[[HTTPConnection, BaseException, ErrorAnswer], ErrorAnswer]
"""Rewrites an error's answer in the format of the API that the request used."""


def build_application(
    title: str,
    errors: ErrorShape,
    *,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    on_error: OnError = lambda connection, error, status: None,
    metrics: Metrics | None = None,
    health: Callable[..., Awaitable[Any]] | None = None,
    ready: Callable[..., Awaitable[Any]] | None = None,
    figures: Callable[[Request], Awaitable[str]] | None = None,
    guard: Dependency | None = None,
    describes: bool = True,
    respell: Respell = lambda connection, error, answer: answer,
) -> FastAPI:
    """An application with `/health`, `/openapi.json` (if `describes`) and the optional routes that are given.

    `metrics`: measures every request. `health`: the handler of `/health`; by default it answers `healthy`.
    `figures`: the text of `/metrics`, protected by `guard`. `app.state.allowed_hosts` holds the names that
    are accepted in Host besides the server's address.
    """
    app = FastAPI(
        title=title,
        version=etude.__version__,
        lifespan=lifespan,
        responses=errors.responses(),
        openapi_url="/openapi.json" if describes else None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.allowed_hosts = ()

    def answer(connection: HTTPConnection, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            on_error(connection, error, CLIENT_LEFT)
            return Response(status_code=CLIENT_LEFT)  # not read: the client is gone
        status, document, headers = respell(connection, error, errors.describe(error))
        on_error(connection, error, status)
        return Json(document, status, headers=dict(headers))

    _answer_errors(app, answer)
    app.add_middleware(_HostCheck, answer=answer)
    if metrics is not None:
        app.add_middleware(Measured, metrics=metrics)
    app.add_api_route("/health", health or _healthy, name="health", responses=_UNREADY)
    if ready is not None:
        app.add_api_route("/ready", ready, name="ready", responses=_UNREADY)
    if figures is not None:

        async def show(request: Request) -> Response:
            """Counters, gauges and latencies for Prometheus."""
            return PlainTextResponse(await figures(request), media_type="text/plain; version=0.0.4")

        guards = [guard] if guard else None
        app.add_api_route(
            "/metrics", show, name="metrics", dependencies=guards, response_class=PlainTextResponse
        )
    return app


def bearer_required(token: str | None) -> Dependency:
    """A dependency that admits only requests with the bearer token; None: admits every request."""

    async def check(connection: HTTPConnection) -> None:
        check_bearer(connection.headers, token)

    return Depends(check)


class Json(JSONResponse):
    """JSON in ASCII, as file names and output may contain lone surrogates."""

    def render(self, content: Any) -> bytes:
        """The bytes of the answer."""
        return json.dumps(content).encode()


class Binary(Response):
    """Bytes of any kind."""

    media_type = "application/octet-stream"


# Bodies


async def pieces(request: Request, limit_bytes: int) -> AsyncIterator[bytes]:
    """Streams a request's body. Raises BodyTooLargeError beyond `limit_bytes`, and UserError if nothing
    arrives for `STALL_S`."""
    received = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(STALL_S):
                piece = await anext(stream, None)
        except TimeoutError as error:
            raise UserError(f"no data came for {STALL_S:g} s", field="body", fix="send it again") from error
        if piece is None:
            return
        received += len(piece)
        _check_size(received, limit_bytes)
        yield piece


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """A request's whole body. Raises BodyTooLargeError beyond `limit_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        _check_size(int(declared), limit_bytes)
    return b"".join([piece async for piece in pieces(request, limit_bytes)])


async def read_parsed(request: Request, limit_bytes: int, parse: Callable[[bytes], T]) -> T:
    """Parses a request's whole body, a large one in a thread. Raises BodyTooLargeError."""
    data = await read_body(request, limit_bytes)
    return await off_loop(len(data), parse, data)


async def read_request(
    request: Request, limit_bytes: int, unpack: Callable[[bytes], Sequence[tuple[Any, bytes]]] | None = None
) -> tuple[Any, bytes]:
    """A request's header and payload, from a JSON body or, with `unpack`, from one frame (`unpack` raises
    ValueError for no frame). Raises UserError for anything else, BodyTooLargeError."""
    body = await read_body(request, limit_bytes)
    kind = "JSON" if unpack is None else f"JSON, or one frame as {FRAMES}"
    if unpack is None or not request.headers.get("content-type", "").startswith(FRAMES):
        return await off_loop(len(body), parse_json, body) if body else {}, b""
    try:
        (frame,) = await off_loop(len(body), unpack, body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is not a request: {error}", field="body", fix=f"send {kind}") from error
    return frame


def _check_size(num_bytes: int, limit_bytes: int) -> None:
    if num_bytes > limit_bytes:
        fix = f"send {limit_bytes} bytes at most"
        raise BodyTooLargeError("the request is too large", field="body", received=num_bytes, fix=fix)


# Clients that disconnect


async def until_disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. Ignores what it still sends over a WebSocket."""
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass


async def unless_disconnected(client: Request | WebSocket, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect if the client disconnects first."""
    return await unless(work, until_disconnected(client.receive), ClientDisconnect())


# Errors


def _answer_errors(app: FastAPI, answer: Callable[[HTTPConnection, Exception], Response]) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            response = answer(request, _refusal(request, error))
            response.headers.update(error.headers or {})
            return response
        return answer(request, _invalid(error) if isinstance(error, RequestValidationError) else error)

    handled = (EtudeError, TimeoutError, ClientDisconnect, HTTPException, RequestValidationError, Exception)
    for kind in handled:
        app.add_exception_handler(kind, on_error)


def _refusal(request: Request, error: HTTPException) -> RouteError:
    describes = request.app.openapi_url is not None
    field, fix = "path", "GET /openapi.json describes every route" if describes else None
    if error.status_code == 405:
        headers = error.headers or {}
        field, fix = "method", f"use {headers.get('allow') or headers.get('Allow')}"
    asked = f"{request.method} {request.url.path}"
    found = RouteError(str(error.detail), field=field, received=asked, fix=fix)
    found.status = error.status_code
    return found


def _invalid(error: RequestValidationError) -> UserError:
    """The error for a path or query parameter that is missing or of the wrong type."""
    first = error.errors()[0]
    where, *names = first["loc"]
    field = ".".join(map(str, names)) or str(where)
    return UserError(
        str(first["msg"]), field=field, received=first.get("input"), fix=f"send it in the {where}"
    )


async def _healthy() -> Response:
    """Whether the process answers."""
    return Json({"status": "healthy"})


# Middleware


class _HostCheck:
    """Middleware that refuses requests by a name that is not the server's, whatever their credentials."""

    def __init__(self, app: ASGIApp, answer: Callable[[HTTPConnection, Exception], Response]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it."""
        if scope["type"] in ("http", "websocket"):
            connection = HTTPConnection(scope)
            address = scope["server"][0] if scope.get("server") else None
            try:
                check_names(connection.headers, address, connection.app.state.allowed_hosts)
            except AccessError as error:
                answer = self._answer(connection, error)
                if scope["type"] == "http":
                    await answer(scope, receive, send)
                else:
                    await send({"type": "websocket.close", "code": 1008, "reason": error.message})
                return
        await self._app(scope, receive, send)


class Measured:
    """Middleware that measures each request, from its first byte to the last byte of its answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_recorded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start_s = time.monotonic()
        try:
            await self._app(scope, receive, send_recorded)
        finally:
            operation, server = getattr(scope.get("route"), "name", "none"), self._metrics.server
            seconds = time.monotonic() - start_s
            self._metrics.observe(f"{server}_request_seconds", seconds, operation=operation)
            self._metrics.count(f"{server}_requests", operation=operation, status=str(status))
