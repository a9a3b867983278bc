"""The recording server as an ASGI application and as a process, with its shutdown.

The first SIGTERM (or SIGINT) drains: no new sessions are accepted, `/health` reports it, live sessions may
finish within `drain_s`. Then, or at a second signal, the process ends. A killed server has stored every
session whose finish it has acknowledged; live sessions are recovered at the next start, with every answer
whose end was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import HTTPConnection

from etude.environment.recording.live import LiveSessions, RecordedSession
from etude.environment.recording.server.routes import ERRORS, agents, sessions_of, trainers
from etude.environment.recording.sessions import Recordings
from etude.errors import EtudeError
from etude.kit.tasks import sweeping
from etude.serving.application import build_application
from etude.serving.metrics import Metrics
from etude.serving.process import Draining, run_server
from etude.tokens.chat.dialects import respell_error

_log = logging.getLogger("etude.recording.server")
SERVER = "recording server"
"""Its name in messages."""
_SWEEP_S = 30.0


def build_app(sessions: LiveSessions) -> FastAPI:
    """An ASGI application that serves sessions to agents. For `Recordings` it also has the routes of the
    trainer and of watchers, stores idle sessions, and closes all when it ends."""

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
    app.include_router(agents)
    app.include_router(agents, prefix="/s/{session}", dependencies=[Depends(_named)])
    if recordings is not None:
        app.include_router(trainers)
    return app


async def _named(session: str) -> None:
    """Declares the path parameter `session` in the description of the routes."""


async def _sweep(recordings: Recordings) -> None:
    try:
        await recordings.expire()
    except EtudeError as error:  # the store failed; the sessions stay, and are stored at a later try
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


async def serve(
    recordings: Recordings,
    listeners: Sequence[socket.socket],
    *,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
    note: str = "",
) -> None:
    """Serves until a signal ends it; prints to stderr when and where it is ready, and `note`.

    `listeners`: from `open_listeners`, closed at the end. Raises ConfigError.
    """
    recovered = await asyncio.to_thread(recordings.recover)
    if recovered:
        note = "; ".join(filter(None, (note, f"took up {recovered} live session{'s' * (recovered != 1)}")))
    await run_server(
        build_app(recordings),
        SERVER,
        Draining("sessions", drain_s, recordings, lambda: len(recordings) > 0),
        listeners,
        note=note,
        allowed_hosts=allowed_hosts,
        certificate=certificate,
        key=key,
    )
