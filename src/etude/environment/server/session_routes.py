"""Routes of sessions: begin, turns, archive, diff, submit, pause, resume, fork, end; their tools over MCP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from etude.agent.inputs import result_document
from etude.environment.names import template_of
from etude.environment.running import unwatched
from etude.environment.server import requests
from etude.environment.server.host import Held, SessionHost
from etude.environment.server.requests import (
    Box,
    Host,
    Tenant,
    create_session,
    fields_of,
    long,
    no_such_snapshot,
    wants_frames,
)
from etude.environment.sessions import EnvironmentSession
from etude.environment.wire import calls_of, known_of, outcome_document, status_of_text
from etude.errors import InfrastructureError, UserError
from etude.kit.tasks import off_loop
from etude.records import ToolCall, ToolResult
from etude.sandbox.answers import encode_changes
from etude.sandbox.inside.frames import pack
from etude.sandbox.wire_types import encode_error
from etude.serving.application import Json, read_body
from etude.serving.describing import answering, described
from etude.serving.json_bodies import parse_json
from etude.serving.long_answers import OutputBuffer
from etude.serving.messages import FRAMES, Encoded

T = TypeVar("T")
LONG = answering("application/json", FRAMES)
router = APIRouter()
_MCP_BYTES = 8 << 20


@router.post("/sessions", responses=LONG, openapi_extra=described(requests.CREATE))
async def create(request: Request, host: Host, tenant: Tenant) -> Response:
    """A new session from a task, files, a directory, a repository, a snapshot or a fork.

    The same `Idempotency-Key` gives the same session, also while it is being made.
    """
    named = await fields_of(request, requests.CREATE)
    host.check_accepting()

    async def make() -> str:
        return (await create_session(host, tenant, named)).session.id

    making = _begin_once(request, host, tenant, named, make)

    async def work() -> Encoded:
        return describe(host.find(tenant, await asyncio.shield(making)).session), b""

    return long(request, work())


@router.get("/sessions")
async def list_sessions(host: Host, tenant: Tenant) -> Response:
    """The tenant's sessions, oldest first."""
    return Json([describe(held.session) for held in host.list(tenant)])


@router.get("/sessions/{session_id}")
async def get_session(held: Box) -> Response:
    """What is known of a session."""
    return Json(describe(held.session))


@router.delete("/sessions/{session_id}", responses=LONG)
async def close_session(request: Request, held: Box, host: Host) -> Response:
    """Ends a session and its sandbox."""

    async def work() -> Encoded:
        await host.end(held)
        return {"closed": True}, b""

    return long(request, work())


class TurnFrames(OutputBuffer):
    """Calls and results of a turn on their way to the client that waits for it.

    What it does not take in time is left out: the last frame has every result.
    """

    def on_call(self, position: int, call: ToolCall) -> None:
        """A call begins."""
        self.put_frame({"event": "call_started", "position": position})

    def on_result(self, position: int, call: ToolCall, result: ToolResult) -> None:
        """A call has ended."""
        self.put_frame({"event": "call_ended", "position": position, "result": result_document(result)})


@router.post("/sessions/{session_id}/turns", responses=LONG, openapi_extra=described(requests.TURN))
async def run_turn(request: Request, held: Box, host: Host) -> Response:
    """Runs one turn's calls; their results in call order. It goes on if the client leaves.

    `turn` (its number, from 0) or an `Idempotency-Key` names it: sent again, it is not run again.
    """
    named = await fields_of(request, requests.TURN)
    calls, known = calls_of(named["calls"]), known_of(named.get("known", {}))
    number, key = named.get("turn"), request.headers.get("idempotency-key")
    # Looked at before anything is answered, so that a conflict has a status of its own.
    held.session.history.find(number, key, calls)
    frames = TurnFrames(pack)

    async def work() -> Encoded:
        async with host.turn(held, calls, number, key) as session:
            results = await session.turn(calls, number, frames.on_call, frames.on_result, known, key)
        return {
            "results": [result_document(result) for result in results],
            "turns": session.num_turns,
            "finished": session.finished,
        }, b""

    return long(request, work(), frames if wants_frames(request) else None)


@router.post("/sessions/{session_id}/archive", responses=LONG, openapi_extra=described(requests.ARCHIVE))
async def archive(request: Request, held: Box, host: Host) -> Response:
    """Keeps a text as a file of the workspace; `error` says in words for the agent why it could not."""
    named = await fields_of(request, requests.ARCHIVE)
    template_of({named["path"]: named["text"]}, "archive")

    async def work() -> Encoded:
        async with host.using(held) as session:
            return {"error": await session.archive(named["path"], named["text"])}, b""

    return long(request, work())


@router.get("/sessions/{session_id}/diff", responses=LONG)
async def diff(request: Request, held: Box, host: Host) -> Response:
    """What differs from the beginning: frames with the contents, or JSON with texts."""
    frames = wants_frames(request)

    async def work() -> Encoded:
        async with host.using(held) as session:
            changes = await session.diff()
        if frames:
            return encode_changes(changes)
        texts = {
            path: None if data is None else data.decode(errors="replace") for path, data in changes.items()
        }
        return {"files": texts}, b""

    return long(request, work())


@router.post("/sessions/{session_id}/submit", responses=LONG, openapi_extra=described(requests.SUBMIT))
async def submit(request: Request, held: Box, host: Host) -> Response:
    """Ends the session and grades it. Asked again, it gives the same outcome."""
    named = await fields_of(request, requests.SUBMIT)
    status = status_of_text(named.get("status"))

    async def work() -> Encoded:
        async with host.using(held) as session:
            first = session.outcome is None
            outcome = await session.submit(status, named.get("cause", ""))
        if first:
            passed = str(outcome.verdict.passed).lower()
            host.metrics.count("etude_environment_graded", passed=passed, tenant=held.tenant)
        return outcome_document(outcome), b""

    return long(request, work())


@router.post("/sessions/{session_id}/pause", responses=LONG, openapi_extra=described(requests.NOTHING))
async def pause(request: Request, held: Box, host: Host) -> Response:
    """Puts the sandbox to sleep; `kept` says what of it."""

    async def work() -> Encoded:
        async with host.using(held) as session:
            return {"kept": await session.pause()}, b""

    return long(request, work())


@router.post("/sessions/{session_id}/resume", responses=LONG, openapi_extra=described(requests.NOTHING))
async def resume(request: Request, held: Box, host: Host) -> Response:
    """Wakes the sandbox."""

    async def work() -> Encoded:
        async with host.using(held) as session:
            await session.resume()
            return describe(session), b""

    return long(request, work())


@router.post("/sessions/{session_id}/snapshot", responses=LONG, openapi_extra=described(requests.NOTHING))
async def snapshot(request: Request, held: Box, host: Host) -> Response:
    """A durable copy of the workspace, with which sessions of this tenant may begin."""

    async def work() -> Encoded:
        async with host.using(held) as session:
            kept = await session.snapshot()
        host.snapshots[kept] = held.tenant
        return {"snapshot": kept}, b""

    return long(request, work())


@router.get("/snapshots")
async def list_snapshots(host: Host, tenant: Tenant) -> Response:
    """The snapshots that this tenant asked for."""
    return Json([snapshot for snapshot, owner in host.snapshots.items() if owner == tenant])


@router.delete("/snapshots/{snapshot_id}", responses=LONG)
async def delete_snapshot(snapshot_id: str, request: Request, host: Host, tenant: Tenant) -> Response:
    """Deletes one; sessions that began with it go on."""

    async def work() -> Encoded:
        if host.snapshots.get(snapshot_id) != tenant:
            raise no_such_snapshot(snapshot_id)
        await host.site.backend.delete_snapshot(snapshot_id)
        del host.snapshots[snapshot_id]
        return {"deleted": True}, b""

    return long(request, work())


@router.post("/sessions/{session_id}/fork", responses=LONG, openapi_extra=described(requests.FORK))
async def fork(request: Request, held: Box, host: Host, tenant: Tenant) -> Response:
    """Copies of the session, now or as it was after `turn` turns: for each its description, or its error.

    The same `Idempotency-Key` gives the same copies.
    """
    named = await fields_of(request, requests.FORK)
    count = named.get("count", 1)
    if not 1 <= count <= host.limits.max_forks:
        raise UserError(
            f"must be 1 to {host.limits.max_forks}", field="count", received=count, fix="change it"
        )
    host.check_accepting()

    async def make() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        async with host.place(tenant, count), host.using(held) as parent:
            for made in await parent.fork(count, named.get("turn")):
                if isinstance(made, InfrastructureError):
                    host.note_error(made)
                    rows.append({"error": encode_error(made)})
                else:
                    host.hold(tenant, made)
                    rows.append({"id": made.id})
        host.metrics.count("etude_environment_forks", len(rows), tenant=tenant)
        return rows

    making = _begin_once(request, host, tenant, {"session": held.session.id, **named}, make)

    async def work() -> Encoded:
        rows: list[dict[str, Any]] = await asyncio.shield(making)
        return [
            row if "error" in row else describe(host.find(tenant, row["id"]).session) for row in rows
        ], b""

    return long(request, work())


def _begin_once(
    request: Request, host: SessionHost, tenant: str, body: object, make: Callable[[], Coroutine[Any, Any, T]]
) -> asyncio.Task[T]:
    """The work of a request, which goes on without its client; the same `Idempotency-Key` gives the same."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return host.in_background(make())
    return host.creations.get_or_start(f"{tenant}\0{key}", body, lambda: host.in_background(make())).task


class McpAnswer(Response):
    """Has the session answer the request, whose body was read already, each call as one turn of it.

    Nothing is kept for the next: what matters is in our session, so a client may come back at any time.
    """

    def __init__(self, host: SessionHost, held: Held, body: bytes) -> None:
        super().__init__()
        self._host = host
        self._held = held
        self._body: bytes | None = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer as ASGI sends it."""

        async def receive_again() -> Message:
            body, self._body = self._body, None
            return await receive() if body is None else {"type": "http.request", "body": body}

        async def run(call: ToolCall) -> ToolResult:
            async with self._host.turn(self._held, [call]) as session:
                (result,) = await session.run_calls([call], {}, unwatched, unwatched)
            return result

        make_server, manager_of = await asyncio.to_thread(_load_package)
        async with self._host.using(self._held) as session:
            server = make_server(session.context, f"etude {session.id}", run)
            manager = manager_of(server, json_response=True, stateless=True)
            async with manager.run():
                await manager.handle_request(scope, receive_again, send)


@router.post("/sessions/{session_id}/mcp", include_in_schema=False)
async def mcp(request: Request, held: Box, host: Host) -> Response:
    """One MCP request. The server sends nothing unasked, so there is no stream to GET."""
    body = await read_body(request, min(host.limits.body_bytes, _MCP_BYTES))
    if body:
        await off_loop(len(body), parse_json, body)  # the package's own reading has no bounds
    return McpAnswer(host, held, body)


def _load_package() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What answers. Its package takes its time: the server does without until somebody asks."""
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from etude.agent.mcp.server import mcp_server

    return mcp_server, StreamableHTTPSessionManager


def describe(session: EnvironmentSession) -> dict[str, Any]:
    """A session as clients see it: plain JSON values."""
    return {
        "id": session.id,
        "task": session.task.id if session.task else None,
        "instruction": session.instruction,
        "state": session.state,
        "busy": session.busy,
        "turns": session.num_turns,
        "finished": session.finished,
        "agent_error": session.agent_error,
        "origin": session.origin.digest,
        "created_s": session.created_s,
        "parent": session.parent,
        "parent_turn": session.parent_turn,
        "differences": [asdict(difference) for difference in session.differences],
        "snapshots": [kept.turn for kept in session.snapshots.kept],
        "snapshot_failures": session.snapshots.num_failures,
        "tools_digest": session.site.tools.digest,
        "last_event": session.events.last,
        "facts": session.facts.to_dict(),
    }
