"""The application: the routes of both APIs, the routes of whoever trains, errors, measurement."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from etude.environment.recording.openai_format import error_document
from etude.environment.recording.server import agent_routes, control_routes
from etude.environment.recording.server.requests import recordings_of
from etude.environment.recording.sessions import Recordings
from etude.errors import EtudeError
from etude.serving.sweeping import sweeping

_log = logging.getLogger("etude.recording.server")
_SWEEP_S = 30.0


def build_app(recordings: Recordings) -> FastAPI:
    """An ASGI application that serves recorded sessions and closes them when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with sweeping(lambda: _sweep(recordings), recordings.limits.idle_s, _SWEEP_S):
                yield
        finally:
            await recordings.close()

    app = FastAPI(title="Étude recordings", lifespan=lifespan, openapi_url=None)
    app.state.recordings = recordings
    app.include_router(agent_routes.router)
    app.include_router(agent_routes.router, prefix="/s/{session}")
    app.include_router(control_routes.router)
    app.add_api_route("/health", _health)
    app.add_api_route("/metrics", _metrics)
    app.add_exception_handler(EtudeError, _on_error)
    app.add_exception_handler(HTTPException, _on_refusal)
    app.add_exception_handler(Exception, _on_error)
    return app


async def _sweep(recordings: Recordings) -> None:
    try:
        await recordings.expire()
    except EtudeError as error:  # the store; sessions stay, and are tried again
        recordings.counts["errors"] += 1
        _log.error("idle sessions could not be stored: %s", error)


async def _on_error(request: Request, error: Exception) -> Response:
    recordings_of(request).counts["errors"] += 1
    if not isinstance(error, EtudeError):
        _log.error("a request failed", exc_info=error)
    status, document = error_document(error)
    return JSONResponse(document, status)


async def _on_refusal(request: Request, error: Exception) -> Response:
    """No such route, or not with this method: in the shape of every other error."""
    assert isinstance(error, HTTPException), "it is registered for these"
    recordings_of(request).counts["errors"] += 1
    words = f"{error.detail}: {request.method} {request.url.path}"
    row = {"message": words, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": row}, error.status_code, headers=error.headers)


async def _health(request: Request) -> Response:
    recordings = recordings_of(request)
    state = {"status": "draining" if recordings.draining else "ok", "sessions": len(recordings)}
    return JSONResponse(state, 503 if recordings.draining else 200)


async def _metrics(request: Request) -> Response:
    """Prometheus' text format."""
    recordings = recordings_of(request)
    lines: list[str] = []
    for name, value in sorted(recordings.counts.items()):
        lines += [f"# TYPE etude_recording_{name}_total counter", f"etude_recording_{name}_total {value}"]
    gauges = {"sessions": len(recordings), "requests_running": recordings.num_requests}
    for name, value in gauges.items():
        lines += [f"# TYPE etude_recording_{name} gauge", f"etude_recording_{name} {value}"]
    return PlainTextResponse("\n".join(lines) + "\n")
