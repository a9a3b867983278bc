"""The server's application: routes, who may ask, errors, measurement."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

import etude
from etude.environment.history import TurnConflictError
from etude.environment.server import mcp_routes, openenv_routes, server_routes, session_routes
from etude.environment.server.host import SessionHost
from etude.environment.server.requests import AccessError, host_of
from etude.errors import EtudeError, SandboxError
from etude.sandbox.server.app import Measured
from etude.sandbox.server.state import KeyConflictError
from etude.sandbox.server.streams import Json
from etude.sandbox.wire_types import encode_error, status_of

_log = logging.getLogger("etude.environment.server")


def build_app(host: SessionHost, tokens: Mapping[str, str] | None = None) -> FastAPI:
    """An ASGI application that serves a host's sessions, and closes it when it ends.

    `tokens`: token -> tenant; none: whoever reaches it by a loopback name is the tenant `local`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await host.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(host.close)
            yield

    app = FastAPI(title="Étude environments", version=etude.__version__, lifespan=lifespan)
    app.state.host = host
    app.state.tokens = dict(tokens or {})
    app.state.episodes = {}
    for router in (
        server_routes.open_router,
        server_routes.router,
        session_routes.router,
        session_routes.snapshot_router,
        openenv_routes.router,
        mcp_routes.router,
    ):
        app.include_router(router)
    app.add_exception_handler(EtudeError, _on_error)
    app.add_exception_handler(TimeoutError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_departure)
    app.add_exception_handler(Exception, _on_error)
    app.add_middleware(Measured, metrics=host.metrics)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    host_of(request).note_error(error)
    status = status_of(error)
    if isinstance(error, AccessError):
        status = 401
    elif isinstance(error, (KeyConflictError, TurnConflictError)):
        status = 409
    return Json({"error": encode_error(error)}, status)


async def _on_departure(request: Request, error: Exception) -> Response:
    """A client that left while it sent its request; nobody reads this."""
    _log.info("a client left while it sent its request")
    return Json({"error": encode_error(SandboxError("the request was cut off", field="body"))}, 400)
