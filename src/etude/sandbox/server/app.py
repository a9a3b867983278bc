"""The server's application: routes, authentication, errors, measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI, Request

from etude.config.secrets import AccessError, check_bearer
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.server import inside_routes, sandbox_routes, server_routes
from etude.sandbox.server.error_answers import answer_errors
from etude.sandbox.server.requests import state_of
from etude.sandbox.server.state import KeyConflictError, Limits, ServerState
from etude.sandbox.wire_types import API
from etude.serving.application import Measured


def build_app(
    backends: Mapping[str, SandboxBackend],
    token: str | None,
    limits: Limits | None = None,
    peers: tuple[str, ...] = (),
    spool: Path | None = None,
) -> FastAPI:
    """An ASGI application that serves sandboxes and closes the backends when it ends.

    `token`: what clients must present as a bearer; None: anyone who reaches it by a loopback name.
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

    async def check(request: Request) -> None:
        check_bearer(request.headers, token)

    app = FastAPI(title="Étude sandboxes", lifespan=lifespan, openapi_url=None)
    app.state.sandboxes = state
    guarded = [Depends(check)]
    app.include_router(server_routes.open_router)
    app.include_router(server_routes.router, dependencies=guarded)
    app.include_router(sandbox_routes.router, prefix=API, dependencies=guarded)
    app.include_router(inside_routes.router, prefix=API, dependencies=guarded)
    statuses = {AccessError: 401, KeyConflictError: 409}
    answer_errors(app, lambda request, error: state_of(request).note_error(error), statuses)
    app.add_middleware(Measured, metrics=state.metrics)
    return app
