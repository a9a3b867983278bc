"""Routes that create, copy, move and end sandboxes."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from etude.errors import SandboxError, UserError
from etude.sandbox.errors import SandboxMissingError, TemplateError, Unsupported
from etude.sandbox.interface import Sandbox
from etude.sandbox.remote import RemoteBackend
from etude.sandbox.server import requests
from etude.sandbox.server.requests import (
    Named,
    Served,
    State,
    check_choice,
    encoded,
    fields_of,
    inline_template,
    long,
    network_of,
    read_request,
    resources_of,
)
from etude.sandbox.server.state import Creation, ServerState
from etude.sandbox.template import Template, decode_template
from etude.sandbox.wire_types import encode, encode_error
from etude.serving.application import Json
from etude.serving.describing import answering, described
from etude.serving.messages import FRAMES, Encoded

LONG = answering("application/json", FRAMES)
router = APIRouter()


@router.put("/templates", openapi_extra=described(body=FRAMES))
async def put_template(request: Request, state: State) -> Response:
    """Stores a template, sent as one frame, for further creations; answers with its key."""
    raw, payload = await read_request(request, state.limits.template_bytes)
    try:
        template = decode_template(raw, payload)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TemplateError(
            f"invalid template: {error!r}", field="body", fix="encode it with encode_template"
        ) from error
    return Json({"template": state.templates.put(template)})


@router.post("/sandboxes", responses=LONG, openapi_extra=described(requests.CREATE))
async def create(request: Request, state: State) -> Response:
    """Creates a sandbox. One `Idempotency-Key` gives one sandbox, also while it is being created."""
    state.check_accepting()
    named = await fields_of(request, state, requests.CREATE)
    key = request.headers.get("idempotency-key")

    def begin() -> asyncio.Task[str]:
        return state.in_background(_make(state, named))

    creation = Creation("", begin()) if key is None else state.creations.get_or_start(key, named, begin)
    creation.num_claims += 1
    grace_s = 0.0 if key is None else state.limits.unclaimed_s

    def leave(work: asyncio.Task[Encoded]) -> None:
        creation.num_claims -= 1
        work.cancel()
        state.in_background(_end_unclaimed(state, creation, grace_s))

    return long(request, state, _claim(state, creation), finish=leave)


async def _make(state: ServerState, named: dict[str, Any]) -> str:
    name, backend = state.backend(named.get("backend"))
    try:
        sandbox = await backend.create(
            _template(state, named.get("template")),
            resources_of(named.get("resources")),
            network_of(named.get("network")),
            state.limits.bound_life(named.get("timeout_s")),
            named.get("snapshot"),
            named.get("metadata"),
        )
    except BaseException as error:
        state.metrics.count("etude_sandbox_create_failures", backend=name, kind=type(error).__name__)
        raise
    state.metrics.count("etude_sandboxes_created", backend=name)
    state.register(name, sandbox)
    return sandbox.id


def _template(state: ServerState, named: str | dict[str, Any] | None) -> Template | None:
    if named is None:
        return None
    if isinstance(named, dict):
        return inline_template(named)
    template = state.templates.get(named)
    if template is None:
        raise TemplateError(
            "the server does not hold this template",
            field="template",
            received=named,
            fix="upload it with PUT /v1/templates, then retry",
        )
    return template


async def _claim(state: ServerState, creation: Creation) -> Encoded:
    sandbox_id = await asyncio.shield(creation.task)
    served = state.get(sandbox_id)
    if served is None:
        raise SandboxMissingError(
            "the sandbox created with this key has ended",
            field="Idempotency-Key",
            received=sandbox_id,
            fix="use a new key",
        )
    return await encoded(served.sandbox.get_info())


async def _end_unclaimed(state: ServerState, creation: Creation, grace_s: float) -> None:
    """Ends a sandbox whose creator disconnected and does not retry."""
    await asyncio.sleep(grace_s)
    if creation.num_claims:
        return
    creation.task.cancel()
    await asyncio.wait({creation.task})
    if creation.task.cancelled() or creation.task.exception() is not None:
        return
    served = state.get(creation.task.result())
    if served is not None:
        await _end(state, served.sandbox)


async def _end(state: ServerState, sandbox: Sandbox) -> None:
    await sandbox.kill()
    state.remove(sandbox.id)
    state.metrics.count("etude_sandboxes_killed")


@router.get("/sandboxes")
async def list_sandboxes(named: Named) -> Response:
    """The running and paused sandboxes of a backend: `?backend=`."""
    _, backend = named
    return Json(encode(await backend.list()))


@router.get("/sandboxes/{sandbox_id}")
async def get_info(sandbox_id: str, state: State) -> Response:
    """Description and state of one sandbox, paused or not."""
    served = state.get(sandbox_id)
    if served is not None:
        return Json(encode(await served.sandbox.get_info()))
    for backend in state.backends.values():
        for info in await backend.list():
            if info.id == sandbox_id:
                return Json(encode(info))
    return Json(encode(await (await state.find(sandbox_id)).sandbox.get_info()))


@router.post("/sandboxes/{sandbox_id}/connect", responses=LONG)
async def connect(sandbox_id: str, request: Request, state: State) -> Response:
    """A sandbox by its id; a paused one is resumed."""

    async def work() -> Encoded:
        return await encoded((await state.connect(sandbox_id)).sandbox.get_info())

    return long(request, state, work(), finish=state.keep_running)


@router.delete("/sandboxes/{sandbox_id}", responses=LONG)
async def kill(sandbox_id: str, request: Request, state: State) -> Response:
    """Ends a sandbox; `killed` is false if there was none."""

    async def work() -> Encoded:
        try:
            served = state.get(sandbox_id) or await state.connect(sandbox_id)
        except SandboxMissingError:
            return {"killed": False}, b""
        await _end(state, served.sandbox)
        return {"killed": True}, b""

    return long(request, state, work(), finish=state.keep_running)


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204, openapi_extra=described(requests.TIMEOUT))
async def set_timeout(request: Request, served: Served, state: State) -> Response:
    """Sets the time to live; null: none."""
    named = await fields_of(request, state, requests.TIMEOUT)
    await served.sandbox.set_timeout(state.limits.bound_life(named.get("timeout_s")))
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/pause", responses=LONG, openapi_extra=described(requests.PAUSE))
async def pause(request: Request, served: Served, state: State) -> Response:
    """Pauses the sandbox, even if the client disconnects meanwhile."""
    named = await fields_of(request, state, requests.PAUSE)
    check_choice(named, "mode", "full", "filesystem")
    return long(request, state, encoded(served.sandbox.pause(**named)), finish=state.keep_running)


@router.post("/sandboxes/{sandbox_id}/resume", responses=LONG)
async def resume(request: Request, served: Served, state: State) -> Response:
    """Resumes the sandbox, even if the client disconnects meanwhile."""
    return long(request, state, encoded(served.sandbox.resume()), finish=state.keep_running)


@router.post("/sandboxes/{sandbox_id}/snapshots", responses=LONG, openapi_extra=described(requests.SNAPSHOT))
async def create_snapshot(request: Request, served: Served, state: State) -> Response:
    """Creates a snapshot, even if the client disconnects meanwhile."""
    named = await fields_of(request, state, requests.SNAPSHOT)
    check_choice(named, "kind", "full", "filesystem")
    return long(request, state, encoded(served.sandbox.create_snapshot(**named)), finish=state.keep_running)


@router.post("/sandboxes/{sandbox_id}/fork", responses=LONG, openapi_extra=described(requests.FORK))
async def fork(request: Request, served: Served, state: State) -> Response:
    """Copies the sandbox; per copy its id or the error. If the client disconnects, the copies are killed."""
    state.check_accepting()
    named = await fields_of(request, state, requests.FORK)
    if named.get("count", 1) > state.limits.max_forks:
        raise UserError(
            "too many copies",
            field="count",
            received=named["count"],
            fix=f"ask for at most {state.limits.max_forks} at once",
        )
    made: list[Sandbox] = []

    async def work() -> Encoded:
        rows: list[Any] = []
        for copy in await served.sandbox.fork(**named):
            if isinstance(copy, SandboxError):
                state.count_error(copy)
                rows.append({"error": encode_error(copy)})
                continue
            made.append(copy)
            state.register(served.backend, copy)
            state.metrics.count("etude_sandboxes_created", backend=served.backend)
            rows.append({"id": copy.id})
        return rows, b""

    async def end_copies(task: asyncio.Task[Encoded]) -> None:
        await asyncio.wait({task})
        for copy in made:
            await _end(state, copy)

    def leave(task: asyncio.Task[Encoded]) -> None:
        state.in_background(end_copies(task))

    return long(request, state, work(), finish=leave)


@router.post("/sandboxes/{sandbox_id}/migrate", responses=LONG, openapi_extra=described(requests.MIGRATE))
async def migrate(request: Request, served: Served, state: State) -> Response:
    """Moves the sandbox to another server, which must be among this one's peers."""
    named = await fields_of(request, state, requests.MIGRATE)
    if named["url"].rstrip("/") not in state.peers:
        raise Unsupported(
            "this server moves sandboxes only to its peers",
            field="url",
            received=named["url"],
            fix="start the server with --peer and that address",
        )

    async def work() -> Encoded:
        target = RemoteBackend(named["url"], named.get("token"), named.get("backend"))
        try:
            moved = await served.sandbox.migrate(target)
        finally:
            await target.disconnect()
        state.remove(served.sandbox.id)
        return {"id": moved.id}, b""

    return long(request, state, work(), finish=state.keep_running)
