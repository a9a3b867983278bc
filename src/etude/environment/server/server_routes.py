"""Routes about the server: health, metrics, tools, tasks; and the events of a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from etude.environment.server.requests import Host, Tenant, host_of, tenant_of
from etude.environment.session_events import Event
from etude.errors import EtudeError
from etude.sandbox.wire_types import encode_error
from etude.serving.application import STALL_S, Json, unless_gone

router = APIRouter()

REFUSED, TOO_SLOW = 4401, 4408
"""Close codes: no access or no such session; events were dropped for a slow client."""


async def ready(host: Host) -> Response:
    """`ready` (200), or why nothing new is begun (503)."""
    if host.draining:
        return Json({"status": "draining"}, 503)
    problems = await asyncio.to_thread(host.site.backend.doctor)
    if problems:
        return Json({"status": "unable", "problems": problems}, 503)
    return Json({"status": "ready"})


@router.get("/tools")
async def tools(host: Host, tenant: Tenant) -> Response:
    """The tools of this server's sessions: name, description and JSON Schema of each, and their digest."""
    registry = host.site.tools
    rows = [
        {"name": s.name, "description": s.description, "input_schema": s.json_schema()}
        for s in registry.schemas
    ]
    return Json({"digest": registry.digest, "tools": rows})


@router.get("/tasks")
async def tasks(host: Host, tenant: Tenant) -> Response:
    """The tasks with which sessions of this server may begin."""
    return Json([{"name": name, "instruction": task.instruction} for name, task in host.tasks.items()])


@router.websocket("/sessions/{session_id}/events")
async def events(socket: WebSocket, session_id: str) -> None:
    """What happens in a session, as JSON texts: from event number `?after=` + 1 on, until its end.

    Events that are no longer kept are told as one `gap`; who is too slow is told `dropped` and let go.
    """
    await socket.accept()
    try:
        held = host_of(socket).find(tenant_of(socket), session_id)
        after = socket.query_params.get("after", "0")
        is_number = after.isascii() and after.isdecimal() and len(after) < 19
        stream = held.session.events.watch(int(after) if is_number else 0)
    except EtudeError as error:
        await socket.send_json({"event": "refused", "error": encode_error(error)})
        await socket.close(REFUSED)
        return
    # Of a client that has left, or takes nothing; the session goes on.
    with suppress(ClientDisconnect, WebSocketDisconnect, TimeoutError, RuntimeError):
        await unless_gone(socket, _tell(socket, stream))


async def _tell(socket: WebSocket, stream: AsyncIterator[Event]) -> None:
    """Sends events until the session's end, or until some were dropped."""
    async for event in stream:
        async with asyncio.timeout(STALL_S):
            await socket.send_json(event)
        if event["event"] == "dropped":
            await socket.close(TOO_SLOW)
            return
    await socket.close()
