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
from etude.environment.running import ignore_event
from etude.environment.server import requests
from etude.environment.server.host import HostSession, SessionHost
from etude.environment.server.requests import (
    Host,
    PathSession,
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
    return Json([describe(owned.session) for owned in host.list(tenant)])


@router.get("/sessions/{session_id}")
async def get_session(owned: PathSession) -> Response:
    """The description of a session."""
    return Json(describe(owned.session))


@router.delete("/sessions/{session_id}", responses=LONG)
async def close_session(request: Request, owned: PathSession, host: Host) -> Response:
    """Ends a session and its sandbox."""

    async def work() -> Encoded:
        await host.end(owned)
        return {"closed": True}, b""

    return long(request, work())


class TurnFrames(OutputBuffer):
    """Streams the events of a turn to the client that waits for it.

    Events that it does not read in time are dropped: the last frame has every result.
    """

    def on_call(self, position: int, call: ToolCall) -> None:
        """Sends that a call has begun."""
        self.put_frame({"event": "call_started", "position": position})

    def on_result(self, position: int, call: ToolCall, result: ToolResult) -> None:
        """Sends the result of a call."""
        self.put_frame({"event": "call_ended", "position": position, "result": result_document(result)})


@router.post("/sessions/{session_id}/turns", responses=LONG, openapi_extra=described(requests.TURN))
async def run_turn(request: Request, owned: PathSession, host: Host) -> Response:
    """Runs one turn's calls; returns their results in call order. The turn continues if the client
    disconnects.

    `turn` (its number, from 0) or an `Idempotency-Key` identifies it: a repeated request does not run it
    again.
    """
    named = await fields_of(request, requests.TURN)
    calls, known = calls_of(named["calls"]), known_of(named.get("known", {}))
    number, key = named.get("turn"), request.headers.get("idempotency-key")
    # Checked before the answer begins, so that a conflict has its own status code.
    owned.session.history.find(number, key, calls)
    frames = TurnFrames(pack)

    async def work() -> Encoded:
        async with host.turn(owned, calls, number, key) as session:
            results = await session.turn(calls, number, frames.on_call, frames.on_result, known, key)
        return {
            "results": [result_document(result) for result in results],
            "turns": session.num_turns,
            "finished": session.finished,
        }, b""

    return long(request, work(), frames if wants_frames(request) else None)


@router.post("/sessions/{session_id}/archive", responses=LONG, openapi_extra=described(requests.ARCHIVE))
async def archive(request: Request, owned: PathSession, host: Host) -> Response:
    """Writes a text to a file of the workspace; `error`: why that failed, in words for the agent."""
    named = await fields_of(request, requests.ARCHIVE)
    template_of({named["path"]: named["text"]}, "archive")

    async def work() -> Encoded:
        async with host.using(owned) as session:
            return {"error": await session.archive(named["path"], named["text"])}, b""

    return long(request, work())


@router.get("/sessions/{session_id}/diff", responses=LONG)
async def diff(request: Request, owned: PathSession, host: Host) -> Response:
    """Changes since the beginning: frames with the contents, or JSON with texts."""
    frames = wants_frames(request)

    async def work() -> Encoded:
        async with host.using(owned) as session:
            changes = await session.diff()
        if frames:
            return encode_changes(changes)
        texts = {
            path: None if data is None else data.decode(errors="replace") for path, data in changes.items()
        }
        return {"files": texts}, b""

    return long(request, work())


@router.post("/sessions/{session_id}/submit", responses=LONG, openapi_extra=described(requests.SUBMIT))
async def submit(request: Request, owned: PathSession, host: Host) -> Response:
    """Ends the session and grades it. Idempotent."""
    named = await fields_of(request, requests.SUBMIT)
    status = status_of_text(named.get("status"))

    async def work() -> Encoded:
        async with host.using(owned) as session:
            first = session.outcome is None
            outcome = await session.submit(status, named.get("cause", ""))
        if first:
            passed = str(outcome.verdict.passed).lower()
            host.metrics.count("etude_environment_graded", passed=passed, tenant=owned.tenant)
        return outcome_document(outcome), b""

    return long(request, work())


@router.post("/sessions/{session_id}/pause", responses=LONG, openapi_extra=described(requests.NOTHING))
async def pause(request: Request, owned: PathSession, host: Host) -> Response:
    """Pauses the sandbox; `kept`: what is preserved."""

    async def work() -> Encoded:
        async with host.using(owned) as session:
            return {"kept": await session.pause()}, b""

    return long(request, work())


@router.post("/sessions/{session_id}/resume", responses=LONG, openapi_extra=described(requests.NOTHING))
async def resume(request: Request, owned: PathSession, host: Host) -> Response:
    """Resumes the sandbox."""

    async def work() -> Encoded:
        async with host.using(owned) as session:
            await session.resume()
            return describe(session), b""

    return long(request, work())


@router.post("/sessions/{session_id}/snapshot", responses=LONG, openapi_extra=described(requests.NOTHING))
async def snapshot(request: Request, owned: PathSession, host: Host) -> Response:
    """Makes a durable copy of the workspace, from which sessions of this tenant may begin."""

    async def work() -> Encoded:
        async with host.using(owned) as session:
            kept = await session.snapshot()
        host.snapshots[kept] = owned.tenant
        return {"snapshot": kept}, b""

    return long(request, work())


@router.get("/snapshots")
async def list_snapshots(host: Host, tenant: Tenant) -> Response:
    """The snapshots of this tenant."""
    return Json([snapshot for snapshot, owner in host.snapshots.items() if owner == tenant])


@router.delete("/snapshots/{snapshot_id}", responses=LONG)
async def delete_snapshot(snapshot_id: str, request: Request, host: Host, tenant: Tenant) -> Response:
    """Deletes a snapshot; sessions that began from it continue."""

    async def work() -> Encoded:
        if host.snapshots.get(snapshot_id) != tenant:
            raise no_such_snapshot(snapshot_id)
        await host.services.backend.delete_snapshot(snapshot_id)
        del host.snapshots[snapshot_id]
        return {"deleted": True}, b""

    return long(request, work())


@router.post("/sessions/{session_id}/fork", responses=LONG, openapi_extra=described(requests.FORK))
async def fork(request: Request, owned: PathSession, host: Host, tenant: Tenant) -> Response:
    """Copies of the session as it is or as it was after `turn` turns: for each its description, or its error.

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
        async with host.reserve(tenant, count), host.using(owned) as parent:
            for made in await parent.fork(count, named.get("turn")):
                if isinstance(made, InfrastructureError):
                    host.note_error(made)
                    rows.append({"error": encode_error(made)})
                else:
                    host.register(tenant, made)
                    rows.append({"id": made.id})
        host.metrics.count("etude_environment_forks", len(rows), tenant=tenant)
        return rows

    making = _begin_once(request, host, tenant, {"session": owned.session.id, **named}, make)

    async def work() -> Encoded:
        rows: list[dict[str, Any]] = await asyncio.shield(making)
        return [
            row if "error" in row else describe(host.find(tenant, row["id"]).session) for row in rows
        ], b""

    return long(request, work())


def _begin_once(
    request: Request, host: SessionHost, tenant: str, body: object, make: Callable[[], Coroutine[Any, Any, T]]
) -> asyncio.Task[T]:
    """Runs a request's work independently of its client; the same `Idempotency-Key` gives the same result."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return host.in_background(make())
    return host.creations.get_or_start(f"{tenant}\0{key}", body, lambda: host.in_background(make())).task


class McpAnswer(Response):
    """Answers an MCP request, whose body was read already; each call is one turn of the session.

    No state is kept between requests: all of it is in our session, so a client may reconnect at any time.
    """

    def __init__(self, host: SessionHost, owned: HostSession, body: bytes) -> None:
        super().__init__()
        self._host = host
        self._owned = owned
        self._body: bytes | None = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""

        async def receive_again() -> Message:
            body, self._body = self._body, None
            return await receive() if body is None else {"type": "http.request", "body": body}

        async def run(call: ToolCall) -> ToolResult:
            async with self._host.turn(self._owned, [call]) as session:
                (result,) = await session.run_calls([call], {}, ignore_event, ignore_event)
            return result

        make_server, manager_of = await asyncio.to_thread(_load_package)
        async with self._host.using(self._owned) as session:
            server = make_server(session.context, f"etude {session.id}", run)
            manager = manager_of(server, json_response=True, stateless=True)
            async with manager.run():
                await manager.handle_request(scope, receive_again, send)


@router.post("/sessions/{session_id}/mcp", include_in_schema=False)
async def mcp(request: Request, owned: PathSession, host: Host) -> Response:
    """One MCP request. The server sends no notifications, so there is no stream to GET."""
    body = await read_body(request, min(host.limits.body_bytes, _MCP_BYTES))
    if body:
        await off_loop(len(body), parse_json, body)  # the package's own parser has no limits
    return McpAnswer(host, owned, body)


def _load_package() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Imports the MCP package at the first request, because it is slow to import."""
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
        "tools_digest": session.services.tools.digest,
        "last_event": session.events.last,
        "facts": session.facts.to_dict(),
    }
