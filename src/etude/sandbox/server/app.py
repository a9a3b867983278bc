"""The server's application (routes, authentication, errors, measurement), and its process.

What a killed process leaves, the backends clear away at the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
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
from etude.serving.listening import check_token, open_listeners
from etude.serving.process import Draining, run_server

DEFAULT_PORT = 8642


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


def serve(
    backends: Mapping[str, SandboxBackend],
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    token: str | None,
    limits: Limits | None = None,
    peers: tuple[str, ...] = (),
    spool: Path | None = None,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves sandboxes until a signal ends it. Blocks.

    `token` None is for loopback addresses alone. `certificate` and `key`: PEM files; without them tokens
    cross the network in the clear. Raises ConfigError.
    """
    check_token(host, token is not None)
    app = build_app(backends, token, limits, peers, spool)
    state: ServerState = app.state.sandboxes

    async def is_busy() -> bool:
        return any((await state.prune()).values())

    draining = Draining("sandboxes", drain_s, state, is_busy)
    listeners = open_listeners(host, port)
    asyncio.run(
        run_server(
            app,
            "sandbox server",
            draining,
            listeners,
            allowed_hosts=(host, *allowed_hosts),
            certificate=certificate,
            key=key,
        )
    )
