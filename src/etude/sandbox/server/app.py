"""The server's application: routes, authentication, errors, measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from etude.sandbox.interface import SandboxBackend
from etude.sandbox.server import calls, sandbox_routes, server_routes
from etude.sandbox.server.requests import TornUploadError
from etude.sandbox.server.state import KeyConflictError, Limits, ServerState
from etude.sandbox.wire_types import API, STATUSES, encode_error
from etude.serving.application import bearer_required, build_application
from etude.serving.errors import OwnErrors


def build_app(
    backends: Mapping[str, SandboxBackend],
    token: str | None,
    limits: Limits | None = None,
    peers: tuple[str, ...] = (),
    spool: Path | None = None,
) -> FastAPI:
    """An ASGI application that serves sandboxes and closes the backends when it ends.

    `token`: what clients must present as a bearer; None: none is asked for.
    `peers`: addresses of servers to which sandboxes may be moved. `spool`: directory for uploads and
    exports on their way, `spool` of the state directory if None; what a killed server left is removed.
    """
    state = ServerState(backends, limits or Limits(), tuple(p.rstrip("/") for p in peers), spool)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(state.clear_spool)
        try:
            yield
        finally:
            await state.close()

    guard = bearer_required(token)
    app = build_application(
        "Étude sandboxes",
        OwnErrors({KeyConflictError: 409, TornUploadError: 400, **STATUSES}, encode_error),
        lifespan=lifespan,
        on_error=lambda connection, error, status: state.note_error(error),
        metrics=state.metrics,
        health=server_routes.health,
        figures=lambda request: state.metrics_text(),
        guard=guard,
    )
    app.state.sandboxes = state
    app.include_router(server_routes.router, dependencies=[guard])
    app.include_router(sandbox_routes.router, prefix=API, dependencies=[guard])
    app.include_router(calls.router, prefix=API, dependencies=[guard])
    return app
