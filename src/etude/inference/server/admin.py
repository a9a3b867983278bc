"""The administrator's routes: a new policy version from its manifest, staged beside the current one, put into
service between two steps. What is refused leaves the version in service as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.errors import WeightUpdateError
from etude.inference.server.requests import body_of, check_admin, state_of
from etude.inference.server.responding import refusal
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, TensorEntry, WeightManifest
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.fields import integer, objects, text, unsupported, wrong

router = APIRouter()
_BODY_FIELDS = {"manifest", "version", "kv"}


def manifest_document(manifest: WeightManifest) -> dict[str, Any]:
    """A manifest as plain JSON values: the body of `POST /admin/weights` is `{"manifest": this}`."""
    return asdict(manifest)


def read_manifest(value: object, field: str = "manifest") -> WeightManifest:
    """What `manifest_document` gave. Raises BadRequestError."""
    row = _object(value, field, {"version", "tensors", "url", "base"})
    base = row.get("base")
    return WeightManifest(
        version=read_version(row.get("version"), f"{field}.version"),
        tensors=tuple(
            _entry(entry, f"{field}.tensors[{place}]")
            for place, entry in enumerate(objects(row.get("tensors"), f"{field}.tensors"))
        ),
        url=text(row.get("url"), f"{field}.url"),
        base=None if base is None else read_version(base, f"{field}.base"),
    )


def read_version(value: object, field: str) -> PolicyVersion:
    """A policy version. Raises BadRequestError."""
    row = _object(value, field, {one.name for one in fields(PolicyVersion)})
    step = integer(row, "step", 0)
    adapter = row.get("adapter")
    if step is None:
        raise wrong(f"{field}.step", None, "a whole number from 0 on")
    return PolicyVersion(
        lineage=text(row.get("lineage"), f"{field}.lineage"),
        step=step,
        digest=text(row.get("digest", ""), f"{field}.digest"),
        format=text(row.get("format", "float32"), f"{field}.format"),
        adapter=None if adapter is None else text(adapter, f"{field}.adapter"),
    )


def _entry(row: Mapping[str, Any], field: str) -> TensorEntry:
    shape, cuts = _numbers(row.get("shape"), f"{field}.shape"), _numbers(row.get("cuts", []), f"{field}.cuts")
    names = [text(row.get(name), f"{field}.{name}") for name in ("name", "dtype", "digest")]
    return TensorEntry(names[0], shape, names[1], names[2], cuts)


def _numbers(value: object, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise wrong(field, value, "a list of whole numbers")
    return tuple(value)


def _object(value: object, field: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise wrong(field, value, "an object")
    for name in value.keys() - known:
        raise unsupported(f"{field}.{name}", value[name], "there is no such field")
    return value


@router.get("/admin/weights")
async def current(request: Request) -> Response:
    """The version in service; null where there is none."""
    try:
        check_admin(request)
    except Exception as error:
        return refusal(state_of(request), "admin", error)
    return JSONResponse({"version": shown(state_of(request).sink.current())})


@router.post("/admin/weights")
async def update(request: Request) -> Response:
    """Stages a manifest and puts it into service."""
    return await _update(request, staging=True, activating=True)


@router.post("/admin/weights/stage")
async def stage(request: Request) -> Response:
    """Stages a manifest: what is served stays."""
    return await _update(request, staging=True, activating=False)


@router.post("/admin/weights/activate")
async def activate(request: Request) -> Response:
    """Puts the staged version into service."""
    return await _update(request, staging=False, activating=True)


async def _update(request: Request, staging: bool, activating: bool) -> Response:
    state = state_of(request)
    try:
        check_admin(request)
        body = _object(await body_of(request), "body", _BODY_FIELDS)
        kv = kv_policy(body.get("kv", "keep"))
        if staging:
            manifest = read_manifest(body.get("manifest"))
            version = manifest.version
            await state.sink.stage(manifest)
        else:
            version = read_version(body.get("version"), "version")
        if activating:
            await state.sink.activate(version, kv)
            state.metrics.count("weight_updates")
    except WeightUpdateError as error:
        refused = BadRequestError(error.message, field=error.field, received=error.received, fix=error.fix)
        return refusal(state, "admin", refused)
    except Exception as error:
        return refusal(state, "admin", error)
    return JSONResponse({"version": shown(state.sink.current()), "staged": shown(version)})


def kv_policy(value: object) -> KvPolicy:
    """What becomes of running answers' keys and values. Raises BadRequestError."""
    for one in get_args(KvPolicy):
        if value == one:
            return one
    raise wrong("kv", value, " or ".join(get_args(KvPolicy)))


def shown(version: PolicyVersion | None) -> dict[str, Any] | None:
    """A version as JSON values."""
    return None if version is None else asdict(version)
