"""The environment server as an ASGI application (access, errors, routes about the server and a session's
events) and as a process (address, shutdown).

The first SIGTERM (or SIGINT) drains: running turns are finished, nothing new is accepted, `/ready` reports
it. Then, after `drain_s` or at a second signal, every session is closed and the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from etude.environment.history import Event, TurnConflictError
from etude.environment.server import openenv, session_routes
from etude.environment.server.host import SessionHost
from etude.environment.server.requests import Host, Tenant, host_of, tenant_of
from etude.errors import ConfigError, EtudeError
from etude.kit.tasks import sweeping
from etude.sandbox.server.state import KeyConflictError
from etude.sandbox.wire_types import STATUSES, encode_error
from etude.serving.application import STALL_S, Json, build_application, unless_disconnected
from etude.serving.errors import OwnErrors
from etude.serving.listening import check_token, open_listeners
from etude.serving.process import Draining, run_server

DEFAULT_PORT = 8652
SERVER = "environment server"
"""Its name in messages."""
_SWEEP_S = 1.0
REFUSED, TOO_SLOW = 4401, 4408
"""Close codes: no access or no such session; events were dropped for a slow client."""
router = APIRouter()


def build_app(host: SessionHost, tokens: Mapping[str, str] | None = None) -> FastAPI:
    """An ASGI application that serves a host's sessions, and closes it when it ends.

    `tokens`: token -> tenant; none: every request belongs to the tenant `local`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with sweeping(host.end_idle, host.limits.idle_s, _SWEEP_S):
                yield
        finally:
            await host.close()

    async def figures(request: Request) -> str:
        return host.metrics_text(await tenant_of(request))

    app = build_application(
        "Étude environments",
        OwnErrors({KeyConflictError: 409, TurnConflictError: 409, **STATUSES}, encode_error),
        lifespan=lifespan,
        on_error=lambda connection, error, status: host.note_error(error),
        metrics=host.metrics,
        ready=ready,
        figures=figures,
    )
    app.state.host = host
    app.state.tokens = dict(tokens or {})
    app.state.episodes = {}
    for routes in (router, session_routes.router, openenv.router):
        app.include_router(routes)
    return app


async def ready(host: Host) -> Response:
    """`ready` (200), or why nothing new is accepted (503)."""
    if host.draining:
        return Json({"status": "draining"}, 503)
    problems = await asyncio.to_thread(host.services.backend.doctor)
    if problems:
        return Json({"status": "unable", "problems": problems}, 503)
    return Json({"status": "ready"})


@router.get("/tools")
async def tools(host: Host, tenant: Tenant) -> Response:
    """The tools of this server's sessions: name, description and JSON Schema of each, and their digest."""
    registry = host.services.tools
    rows = [
        {"name": s.name, "description": s.description, "input_schema": s.json_schema()}
        for s in registry.schemas
    ]
    return Json({"digest": registry.digest, "tools": rows})


@router.get("/tasks")
async def tasks(host: Host, tenant: Tenant) -> Response:
    """The tasks of this server, from which sessions may begin."""
    return Json([{"name": name, "instruction": task.instruction} for name, task in host.tasks.items()])


@router.websocket("/sessions/{session_id}/events")
async def events(socket: WebSocket, session_id: str) -> None:
    """The events of a session, as JSON texts: from event number `?after=` + 1 on, until its end.

    Events that are no longer retained are replaced by one `gap`; a slow watcher gets `dropped` and is
    disconnected.
    """
    await socket.accept()
    try:
        owned = (await host_of(socket)).find(await tenant_of(socket), session_id)
        after = socket.query_params.get("after", "0")
        is_number = after.isascii() and after.isdecimal() and len(after) < 19
        stream = owned.session.events.watch(int(after) if is_number else 0)
    except EtudeError as error:
        await socket.send_json({"event": "refused", "error": encode_error(error)})
        await socket.close(REFUSED)
        return
    # A client that has disconnected, or does not read, does not affect the session.
    with suppress(ClientDisconnect, WebSocketDisconnect, TimeoutError, RuntimeError):
        await unless_disconnected(socket, _send_events(socket, stream))


async def _send_events(socket: WebSocket, stream: AsyncIterator[Event]) -> None:
    """Sends events until the session's end, or until some were dropped."""
    async for event in stream:
        async with asyncio.timeout(STALL_S):
            await socket.send_json(event)
        if event["event"] == "dropped":
            await socket.close(TOO_SLOW)
            return
    await socket.close()


def serve(
    host_sessions: SessionHost,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    tokens: Mapping[str, str] | None = None,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
    tenants_share: bool = False,
) -> None:
    """Serves until a signal ends it. Blocks. Without `tokens` loopback addresses only. Raises ConfigError.

    `port` 0: a free one. Prints to stderr when and where it is ready. `tenants_share`: serve several tenants
    even if their sandboxes share the kernel's per-user limits.
    """
    check_token(host, bool(tokens))
    if not tenants_share:
        _check_neighbours(host_sessions, tokens)
    app = build_app(host_sessions, tokens)

    draining = Draining("turns", drain_s, host_sessions, lambda: bool(host_sessions.num_busy))
    listeners = open_listeners(host, port)
    asyncio.run(
        run_server(
            app,
            SERVER,
            draining,
            listeners,
            note=_note(host_sessions, tokens),
            allowed_hosts=(host, *allowed_hosts),
            certificate=certificate,
            key=key,
        )
    )


def _check_neighbours(host_sessions: SessionHost, tokens: Mapping[str, str] | None) -> None:
    num_tenants = len(set((tokens or {}).values()))
    if num_tenants < 2:
        return
    able = host_sessions.services.backend.capabilities()
    if able.neighbours_share:
        raise ConfigError(
            "sandboxes of different tenants would share the per-user limits of the kernel",
            field="tenants",
            received=f"{num_tenants} tenants, sandboxes of {able.backend}",
            fix="see `neighbours` of `etude doctor`, or allow it with --tenants-share",
        )


def _note(host_sessions: SessionHost, tokens: Mapping[str, str] | None) -> str:
    tenants = len(set((tokens or {}).values()))
    who = f"tokens of {tenants} tenant{'s' * (tenants != 1)}" if tokens else "no token: for this machine only"
    tasks, services = len(host_sessions.tasks), host_sessions.services
    return f"{tasks} task{'s' * (tasks != 1)}, {len(services.tools.schemas)} tools, {who}"
