"""The application: the routes of all APIs, the routes of whoever trains, errors, measurement."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import HTTPConnection

from etude.environment.recording.errors import ERRORS
from etude.environment.recording.live import LiveSessions, RecordedSession
from etude.environment.recording.server import agent_routes, control_routes
from etude.environment.recording.server.requests import sessions_of
from etude.environment.recording.sessions import Recordings
from etude.errors import EtudeError
from etude.serving.application import build_application
from etude.serving.metrics import Metrics
from etude.serving.sweeping import sweeping
from etude.tokens.chat.dialects import respell_error

_log = logging.getLogger("etude.recording.server")
_SWEEP_S = 30.0


def build_app(sessions: LiveSessions) -> FastAPI:
    """An ASGI application that serves sessions to agents. Of `Recordings` it also has the routes of whoever
    trains and of whoever watches, stores those that nobody uses any more, and closes them when it ends."""

    recordings = sessions if isinstance(sessions, Recordings) else None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if recordings is None:
            yield
            return
        try:
            async with sweeping(partial(_sweep, recordings), recordings.limits.idle_s, _SWEEP_S):
                yield
        finally:
            await recordings.close()

    def on_error(connection: HTTPConnection, error: Exception, status: int) -> None:
        sessions.counts["errors"] += 1
        session: RecordedSession | None = getattr(connection.state, "session", None)
        if session is not None and isinstance(error, EtudeError):
            session.refusal = error

    app = build_application(
        "Étude recordings",
        ERRORS,
        lifespan=lifespan,
        on_error=on_error,
        health=None if recordings is None else _health,
        figures=None if recordings is None else _figures,
        describes=recordings is not None,
        respell=lambda connection, error, answer: respell_error(connection.url.path, error, answer),
    )
    app.state.sessions = sessions
    app.include_router(agent_routes.router)
    app.include_router(agent_routes.router, prefix="/s/{session}", dependencies=[Depends(_named)])
    if recordings is not None:
        app.include_router(control_routes.router)
    return app


async def _named(session: str) -> None:
    """The session that a path names: what the description of the routes says of it."""


async def _sweep(recordings: Recordings) -> None:
    try:
        await recordings.expire()
    except EtudeError as error:  # the store; sessions stay, and are tried again
        recordings.counts["errors"] += 1
        _log.error("idle sessions could not be stored: %s", error)


async def _health(request: Request) -> Response:
    sessions = sessions_of(request)
    state = {"status": "draining" if sessions.draining else "ok", "sessions": len(sessions)}
    return JSONResponse(state, 503 if sessions.draining else 200)


async def _figures(request: Request) -> str:
    sessions = sessions_of(request)
    found = Metrics()
    for name, value in sessions.counts.items():
        found.count(f"etude_recording_{name}", value)
    gauges = {"sessions": len(sessions), "requests_running": sessions.num_requests}
    return found.text({f"etude_recording_{name}": value for name, value in gauges.items()})
