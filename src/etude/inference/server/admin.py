"""Admin routes for weights: stage a policy version from its manifest, and activate it between two steps. A
refused update leaves the version in service unchanged."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.errors import WeightUpdateError
from etude.inference.server.requests import body_of, check_admin, state_of
from etude.protocols import KvPolicy
from etude.records import PolicyVersion
from etude.serving.describing import described
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.fields import unsupported, wrong
from etude.weights.documents import manifest_of, version_document, version_of

router = APIRouter(tags=["admin"])
_BODY_FIELDS = {"manifest", "version", "kv"}


@router.get("/admin/weights")
async def current(request: Request) -> Response:
    """The version in service, or null."""
    check_admin(request)
    return JSONResponse({"version": shown(state_of(request).sink.current())})


@router.post("/admin/weights", openapi_extra=described(body="application/json"))
async def update(request: Request) -> Response:
    """Stages a manifest and puts it into service."""
    return await _update(request, staging=True, activating=True)


@router.post("/admin/weights/stage", openapi_extra=described(body="application/json"))
async def stage(request: Request) -> Response:
    """Stages a manifest without activating it."""
    return await _update(request, staging=True, activating=False)


@router.post("/admin/weights/activate", openapi_extra=described(body="application/json"))
async def activate(request: Request) -> Response:
    """Puts the staged version into service."""
    return await _update(request, staging=False, activating=True)


async def _update(request: Request, staging: bool, activating: bool) -> Response:
    state = state_of(request)
    check_admin(request)
    body = await body_of(request)
    for name in body.keys() - _BODY_FIELDS:
        raise unsupported(f"body.{name}", body[name], "there is no such field")
    kv: KvPolicy = body.get("kv", "keep")
    if kv not in get_args(KvPolicy):
        raise wrong("kv", kv, " or ".join(get_args(KvPolicy)))
    try:
        if staging:
            manifest = manifest_of(body.get("manifest"))
            version = manifest.version
            await state.sink.stage(manifest)
        else:
            version = version_of(body.get("version"))
        if activating:
            await state.sink.activate(version, kv)
            state.metrics.count("etude_serve_weight_updates")
    except WeightUpdateError as error:  # refused weights are an error of the request
        raise BadRequestError(
            error.message, field=error.field, received=error.received, fix=error.fix
        ) from error
    return JSONResponse({"version": shown(state.sink.current()), "staged": shown(version)})


def shown(version: PolicyVersion | None) -> dict[str, Any] | None:
    """A version as JSON values."""
    return None if version is None else version_document(version)
