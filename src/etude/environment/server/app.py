"""The server's application: routes, who may ask, errors, measurement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Request

from etude.environment.history import TurnConflictError
from etude.environment.server import mcp_routes, openenv_routes, server_routes, session_routes
from etude.environment.server.host import SessionHost
from etude.environment.server.requests import tenant_of
from etude.sandbox.server.state import KeyConflictError
from etude.sandbox.wire_types import STATUSES, encode_error
from etude.serving.application import build_application
from etude.serving.errors import OwnErrors


def build_app(host: SessionHost, tokens: Mapping[str, str] | None = None) -> FastAPI:
    """An ASGI application that serves a host's sessions, and closes it when it ends.

    `tokens`: token -> tenant; none: every request is of the tenant `local`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await host.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(host.close)
            yield

    async def figures(request: Request) -> str:
        return host.metrics_text(tenant_of(request))

    app = build_application(
        "Étude environments",
        OwnErrors({KeyConflictError: 409, TurnConflictError: 409, **STATUSES}, encode_error),
        lifespan=lifespan,
        on_error=lambda connection, error, status: host.note_error(error),
        metrics=host.metrics,
        ready=server_routes.ready,
        figures=figures,
    )
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
    return app
