"""The server's application: routes, who may ask, errors, measurement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

import etude
from etude.environment.history import TurnConflictError
from etude.environment.server import mcp_routes, openenv_routes, server_routes, session_routes
from etude.environment.server.host import SessionHost
from etude.environment.server.requests import AccessError, host_of
from etude.sandbox.server.error_answers import answer_errors
from etude.sandbox.server.state import KeyConflictError
from etude.serving.application import Measured


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
    statuses = {AccessError: 401, KeyConflictError: 409, TurnConflictError: 409}
    answer_errors(app, lambda request, error: host_of(request).note_error(error), statuses)
    app.add_middleware(Measured, metrics=host.metrics)
    return app
