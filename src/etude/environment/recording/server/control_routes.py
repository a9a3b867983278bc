"""The routes of the trainer: sessions begin, are rewarded, end. An agent's key opens none of them."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.environment.names import check_run_name, check_task_name
from etude.environment.recording.live import RecordingLimits
from etude.environment.recording.server.requests import body_of, recordings_of, tenant_of
from etude.environment.recording.spec import SamplingDefaults, SessionSpec
from etude.errors import StoreError
from etude.records import RewardBreakdown, SamplingParams, Status, TrajectoryId
from etude.serving.describing import described
from etude.tokens.chat.fields import flag, integer, number, text, unsupported, wrong

router = APIRouter()
_NUMBERS = ("epoch", "group", "index")
_SPEC_FIELDS = {*_NUMBERS, "run", "task", "group_size", "consent", "keep_thinking", "sampling", "metadata"}
_SAMPLING_FIELDS = {"temperature", "max_tokens"}
_METADATA_BYTES = 1 << 16
_MAX_REWARD = 1e300


@router.post("/sessions", status_code=201, openapi_extra=described(body="application/json"))
async def create(request: Request) -> Response:
    """Begins a session; its id, base URLs and key."""
    tenant, recordings = tenant_of(request), recordings_of(request)
    spec = _spec(await body_of(request), recordings.limits)
    session = recordings.create(tenant, spec)
    try:
        await session.journal.sync()
    except StoreError:  # else nobody knows its id, and its trajectory cannot be begun again
        await recordings.delete(tenant, session.id)
        raise
    base = f"{str(request.base_url).rstrip('/')}/s/{session.id}"
    row = {"id": session.id, "key": session.key, "openai_base_url": f"{base}/v1", "anthropic_base_url": base}
    return JSONResponse({**row, "trajectory": str(spec.trajectory_id)}, 201)


@router.get("/sessions/{session_id}")
async def get(request: Request, session_id: str) -> Response:
    """What a session holds."""
    return JSONResponse(recordings_of(request).find_owned(tenant_of(request), session_id).describe())


@router.post("/sessions/{session_id}/reward", openapi_extra=described(body="application/json"))
async def reward(request: Request, session_id: str) -> Response:
    """Sets the reward; a later one replaces it."""
    recordings = recordings_of(request)
    session = recordings.find_owned(tenant_of(request), session_id)
    given = _reward(await body_of(request))
    await recordings.set_reward(session, given)
    return JSONResponse({"reward": given.total})


@router.post("/sessions/{session_id}/finish", openapi_extra=described(body="application/json"))
async def finish(request: Request, session_id: str) -> Response:
    """Stores the trajectory; it is on the disk when this answers."""
    tenant, recordings = tenant_of(request), recordings_of(request)
    body = await body_of(request)
    status = body.get("status", Status.DONE.value)
    if status not in list(Status):
        raise wrong("status", status, "one of " + ", ".join(Status))
    given, parsed = body.get("reward"), None
    if given is not None:
        parsed = _reward(given if isinstance(given, dict) else {"task": given})
    cause = text(body.get("cause", ""), "cause")
    return JSONResponse(await recordings.finish(tenant, session_id, Status(status), cause, parsed))


@router.delete("/sessions/{session_id}", status_code=204)
async def delete(request: Request, session_id: str) -> Response:
    """Ends a session; nothing of it is stored."""
    await recordings_of(request).delete(tenant_of(request), session_id)
    return Response(status_code=204)


def _spec(body: dict[str, Any], limits: RecordingLimits) -> SessionSpec:
    unknown = sorted(body.keys() - _SPEC_FIELDS)
    if unknown:
        raise unsupported(unknown[0], "", f"no such field; there are {', '.join(sorted(_SPEC_FIELDS))}")
    numbers = {name: integer(body, name, 0) or 0 for name in _NUMBERS}
    run, task = text(body.get("run", "recording"), "run"), text(body.get("task"), "task")
    identity = TrajectoryId(check_run_name(run), check_task_name(task), **numbers)
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict) or len(json.dumps(metadata)) > _METADATA_BYTES:
        raise wrong("metadata", metadata, f"an object of at most {_METADATA_BYTES} bytes")
    return SessionSpec(
        trajectory_id=identity,
        group_size=integer(body, "group_size", 1) or 0,
        consent=text(body.get("consent", "synthetic"), "consent"),
        keep_thinking=flag(body, "keep_thinking", True),
        sampling=_sampling(body.get("sampling"), limits),
        metadata=metadata,
    )


def _sampling(value: object, limits: RecordingLimits) -> SamplingDefaults:
    if value is None:
        return SamplingDefaults(None, limits.default_max_tokens)
    if not isinstance(value, dict):
        raise wrong("sampling", value, "an object")
    unknown = sorted(value.keys() - _SAMPLING_FIELDS)
    if unknown:
        raise unsupported(f"sampling.{unknown[0]}", "", "only temperature and max_tokens can be fixed")
    limit = integer(value, "max_tokens", 1) or limits.default_max_tokens
    fixed = SamplingParams(number(value, "temperature", 1.0, 0.0, 2.0), max_tokens=limit)
    return SamplingDefaults(fixed, limit)


def _reward(body: dict[str, Any]) -> RewardBreakdown:
    terms = body.get("terms") or {}
    if not isinstance(terms, dict):
        raise wrong("terms", terms, "an object of numbers")
    rows = {str(name): _finite(value, f"terms.{name}") for name, value in terms.items()}
    given = RewardBreakdown(
        _finite(body.get("task"), "task"), rows, text(body.get("version", "1"), "version")
    )
    _finite(given.total, "terms")  # each is finite, and their sum need not be
    return given


def _finite(value: object, field: str) -> float:
    wanted = "a number between -1e300 and 1e300"
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_REWARD:
        raise wrong(field, value if isinstance(value, float | None) else type(value).__name__, wanted)
    return float(value)
