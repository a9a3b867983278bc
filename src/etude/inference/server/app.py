"""The server as an application and as a process: routes, health, metrics, errors in the format of the
requested API; listening address and shutdown.

The first SIGTERM (or SIGINT) drains: new requests are refused with 503, `/ready` reports it, and requests in
progress may finish within `drain_s`. Then, or at a second signal, the process ends.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import HTTPConnection

from etude.inference.server import admin, loan_routes, routes
from etude.inference.server.errors import ERRORS
from etude.inference.server.requests import count_answer, state_of
from etude.inference.server.state import ServerState
from etude.serving.application import build_application
from etude.serving.listening import check_host
from etude.serving.process import Draining, run_server
from etude.tokens.chat.dialects import respell_error

SERVER = "inference server"
"""Its name in messages."""


def build_app(state: ServerState) -> FastAPI:
    """An ASGI application over a state."""

    def on_error(connection: HTTPConnection, error: Exception, status: int) -> None:
        if status >= 500:
            state.metrics.count("etude_serve_engine_failures")
        count_answer(connection, status)

    app = build_application(
        "Étude",
        ERRORS,
        on_error=on_error,
        health=_health,
        ready=_ready,
        figures=_figures,
        respell=lambda connection, error, answer: respell_error(connection.url.path, error, answer),
    )
    app.state.serving = state
    app.include_router(routes.router)
    app.include_router(admin.router)
    app.include_router(loan_routes.router)
    return app


async def _health(request: Request) -> Response:
    """Liveness of the process and its engine."""
    failure = state_of(request).failure()
    if failure is not None:
        return JSONResponse({"status": "failed", "cause": repr(failure)}, 500)
    return JSONResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    """Readiness, version and load."""
    state = state_of(request)
    version = state.sink.current()
    row = {"version": None if version is None else str(version), "pool": state.pool, **state.load()}
    row |= {"model": state.model.name, "draining": state.draining}
    if state.loans is not None:
        row |= {"loan": str(state.loans.state)}
    is_open = version is not None and not state.draining and state.failure() is None
    return JSONResponse(row, 200 if is_open else 503)


async def _figures(request: Request) -> str:
    state = state_of(request)
    gauges = {f"etude_serve_{name}": float(value) for name, value in state.load().items()}
    gauges["etude_serve_draining"] = float(state.draining)
    version = state.sink.current()
    if version is not None:
        gauges["etude_serve_policy_step"] = float(version.step)
    if state.loans is not None:
        gauges["etude_serve_lent"] = float(state.loans.loan is not None)
        gauges["etude_serve_last_return_seconds"] = state.loans.last_return_s
    return state.metrics.text({**gauges, **state.gauges()})


def check_address(host: str, has_keys: bool) -> None:
    """Raises ConfigError for an address that other hosts can reach, unless there are API keys."""
    check_host(
        host, has_keys, "other hosts can reach this address, and there are no keys", "give --tokens-file"
    )


async def serve(
    state: ServerState,
    listeners: Sequence[socket.socket],
    *,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves in the state's event loop until a signal ends it; reports on stderr when it is ready.

    `listeners`: from `open_listeners`, closed at the end; `certificate` and `key`: PEM files, without which
    keys cross the network in the clear. Raises ConfigError.
    """
    await run_server(
        build_app(state),
        SERVER,
        Draining("requests", drain_s, state, lambda: bool(state.live)),
        listeners,
        note=f"it serves {state.model.name} ({state.sink.current() or 'no weights yet'})",
        allowed_hosts=allowed_hosts,
        certificate=certificate,
        key=key,
    )
