"""The server's application (routes, authentication, errors, metrics), its process, and the routes about the
server itself and its snapshots: capabilities, health, pressure, problems.

The backends remove leftovers of a killed server at the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from etude.errors import SandboxError
from etude.sandbox.errors import SnapshotRefusedError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.server import calls, sandbox_routes
from etude.sandbox.server.requests import Named, State, TornUploadError, long, long_answer, receive_upload
from etude.sandbox.server.state import KeyConflictError, Limits, ServerState
from etude.sandbox.wire_types import API, SPEAKS, STATUSES, encode, encode_error, pack_file
from etude.serving.application import Json, bearer_required, build_application
from etude.serving.describing import answering, described
from etude.serving.errors import OwnErrors
from etude.serving.listening import check_token, open_listeners
from etude.serving.messages import FRAMES, Encoded
from etude.serving.process import Draining, run_server

LONG = answering("application/json", FRAMES)
router = APIRouter()


async def health(state: State) -> Response:
    """`ready` (200) or `draining` (503)."""
    if state.draining:
        return Json({"status": "draining"}, 503)
    return Json({"status": "ready"})


@router.get("/v1/capabilities")
async def capabilities(named: Named, state: State) -> Response:
    """The capabilities of a backend of this server (`?backend=`), and the limits of requests."""
    name, backend = named
    return Json(
        {
            "speaks": SPEAKS,
            "backend": name,
            "backends": list(state.backends),
            "capabilities": encode(backend.capabilities()),
            "body_bytes": state.limits.body_bytes,
        }
    )


@router.get("/v1/pressure")
async def pressure(state: State) -> Response:
    """Load of this host: used fractions of its processor, memory and disk, above 1 if work waits."""
    return Json(encode(await state.probe.pressure()))


@router.get("/v1/capacity")
async def capacity(state: State) -> Response:
    """Size of this host: cores, and memory and disk in bytes."""
    return Json(encode(await asyncio.to_thread(state.capacity)))


@router.get("/v1/problems")
async def problems(state: State) -> Response:
    """Current problems, one line each, with its fix."""
    return Json(state.problems())


@router.get("/v1/snapshots")
async def list_snapshots(named: Named) -> Response:
    """The snapshots that a backend can restore: `?backend=`."""
    _, backend = named
    return Json(encode(await backend.list_snapshots()))


@router.delete("/v1/snapshots/{snapshot}", status_code=204)
async def delete_snapshot(snapshot: str, named: Named) -> Response:
    """Deletes a snapshot."""
    _, backend = named
    await backend.delete_snapshot(snapshot)
    return Response(status_code=204)


@router.get("/v1/snapshots/{snapshot}/export", responses=LONG)
async def export_snapshot(snapshot: str, named: Named, state: State) -> Response:
    """Streams a snapshot as one file."""
    _, backend = named
    spool = state.spool_directory()
    file = Path(spool.name, "snapshot")

    async def work() -> Encoded:
        await backend.export_snapshot(snapshot, file)
        return None, b""

    return long_answer(
        work(),
        tail=pack_file(file),
        cleanup=lambda: asyncio.to_thread(spool.cleanup),
        on_error=state.count_error,
    )


@router.post("/v1/snapshots/import", responses=LONG, openapi_extra=described(body=FRAMES))
async def import_snapshot(request: Request, named: Named, state: State) -> Response:
    """Imports the snapshot that the body streams."""
    _, backend = named
    spool = state.spool_directory()
    file = Path(spool.name, "snapshot")
    try:
        await receive_upload(request, state, file)
    except BaseException as error:
        await asyncio.to_thread(spool.cleanup)
        if not isinstance(error, SandboxError):
            raise
        raise SnapshotRefusedError(
            "the uploaded snapshot is incomplete", field="body", received=error.received, fix="send it again"
        ) from error

    async def work() -> Encoded:
        return encode(await backend.import_snapshot(file)), b""

    return long(request, state, work(), cleanup=lambda: asyncio.to_thread(spool.cleanup))


DEFAULT_PORT = 8642


def build_app(
    backends: Mapping[str, SandboxBackend],
    token: str | None,
    limits: Limits | None = None,
    peers: tuple[str, ...] = (),
    spool: Path | None = None,
) -> FastAPI:
    """An ASGI application that serves sandboxes and closes the backends when it ends.

    `token`: the clients' bearer token; None: none is required. `peers`: addresses of servers to which
    sandboxes may be moved. `spool`: directory for uploads and exports in transit, `spool` of the state
    directory if None; leftovers of killed servers are removed.
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
        on_error=lambda connection, error, status: state.count_error(error),
        metrics=state.metrics,
        health=health,
        figures=lambda request: state.metrics_text(),
        guard=guard,
    )
    app.state.sandboxes = state
    app.include_router(router, dependencies=[guard])
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

    `token` None is only allowed for loopback addresses. `certificate` and `key`: PEM files; without them
    tokens are sent unencrypted. Raises ConfigError.
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
