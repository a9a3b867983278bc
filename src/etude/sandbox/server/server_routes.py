"""Routes about the server and its snapshots: what it can, how it is, what it keeps."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from etude.errors import SandboxError
from etude.sandbox.errors import SnapshotRefusedError
from etude.sandbox.file_streams import pack_file
from etude.sandbox.server.requests import Named, State, long, long_answer, receive_upload
from etude.sandbox.wire_types import SPEAKS, encode
from etude.serving.application import Json
from etude.serving.describing import answering, described
from etude.serving.messages import FRAMES, Encoded

LONG = answering("application/json", FRAMES)
router = APIRouter()


async def health(state: State) -> Response:
    """`ready` (200) or `draining` (503)."""
    if state.draining:
        return Json({"status": "draining"}, 503)
    return Json({"status": "ready"})


@router.get("/v1/capabilities")
async def capabilities(named: Named, state: State) -> Response:
    """What a backend of this server can do (`?backend=`), and what the server takes."""
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
    """How loaded this host is: fractions of its processor, memory and disk, above 1 where work waits."""
    return Json(encode(await state.probe.pressure()))


@router.get("/v1/capacity")
async def capacity(state: State) -> Response:
    """What this host has: cores, memory and disk in bytes."""
    return Json(encode(await asyncio.to_thread(state.capacity)))


@router.get("/v1/problems")
async def problems(state: State) -> Response:
    """What does not work at present, each line with its fix."""
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
        on_error=state.note_error,
    )


@router.post("/v1/snapshots/import", responses=LONG, openapi_extra=described(body=FRAMES))
async def import_snapshot(request: Request, named: Named, state: State) -> Response:
    """Takes in the snapshot that the body streams."""
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
            "the snapshot was cut off on its way", field="body", received=error.received, fix="send it again"
        ) from error

    async def work() -> Encoded:
        return encode(await backend.import_snapshot(file)), b""

    return long(request, state, work(), cleanup=lambda: asyncio.to_thread(spool.cleanup))
