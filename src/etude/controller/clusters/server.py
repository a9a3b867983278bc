"""The control API's HTTP server. `wire` lists its routes, `control` implements them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from etude.controller.clusters.board import UnknownMemberError
from etude.controller.clusters.control import Control
from etude.controller.clusters.intake import DamagedSessionError, UnwrittenSessionError
from etude.errors import ConfigError, UserError, WeightUpdateError
from etude.records import PolicyVersion
from etude.serving.application import Json, bearer_required, build_application, read_body, read_request
from etude.serving.describing import BYTES, described
from etude.serving.errors import OwnErrors
from etude.serving.messages import Fields, check_fields
from etude.serving.metrics import Metrics
from etude.weights.documents import version_of

MOST_CLAIMED = 4096
"""Most sessions that one request may claim."""
_BODY_BYTES = 1 << 20
_NONE = type(None)
_ERRORS = OwnErrors(
    {ConfigError: 409, UnknownMemberError: 410, DamagedSessionError: 422, UnwrittenSessionError: 507}
)
_JOIN: Fields = {"name": (str,), "api": (int,), "fingerprint": (dict,)}
_BEAT: Fields = {"member": (str,), "version": (dict, _NONE), "running": (dict,), "trouble": (str,)}
_CLAIM: Fields = {"member": (str,), "version": (dict, _NONE), "most": (int,)}
_MEMBER: Fields = {"member": (str,)}
_FAILURE: Fields = {"member": (str,), "cause": (str,)}
router = APIRouter(prefix="/v1")


def build_app(control: Control, token: str | None) -> FastAPI:
    """An ASGI application for a run's control. `token`: bearer token that clusters must present; None: no
    token is required."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await control.begin()
        try:
            yield
        finally:
            await control.close()

    async def figures(request: Request) -> str:
        return Metrics().text({f"etude_clusters_{name}": value for name, value in control.figures().items()})

    guard = bearer_required(token)
    app = build_application("Étude control", _ERRORS, lifespan=lifespan, figures=figures, guard=guard)
    app.state.control = control
    app.include_router(router, dependencies=[guard])
    return app


def _control(request: Request) -> Control:
    return request.app.state.control


async def _fields(request: Request, fields: Fields) -> dict[str, Any]:
    raw, _ = await read_request(request, _BODY_BYTES)
    return check_fields(raw, fields)


@router.get("/run")
async def get_run(request: Request) -> Response:
    """Describes the run."""
    return Json(_control(request).run())


@router.get("/manifest")
async def get_manifest(request: Request, known: str = "") -> Response:
    """Manifest of the weights in service, once their version key differs from `known`; null if none comes."""
    return Json(await _control(request).manifest(known, request.is_disconnected))


@router.post("/join", openapi_extra=described(_JOIN))
async def join(request: Request) -> Response:
    """Registers a cluster."""
    named = await _fields(request, _JOIN)
    fingerprint = {str(name): str(value) for name, value in named["fingerprint"].items()}
    return Json(_control(request).join(named["name"], named["api"], fingerprint))


@router.post("/beat", openapi_extra=described(_BEAT))
async def beat(request: Request) -> Response:
    """A cluster's heartbeat."""
    named = await _fields(request, _BEAT)
    running = named["running"]
    if not all(isinstance(number, int) and number >= 0 for number in running.values()):
        raise UserError("must be numbers of tokens by lease", field="running", fix="correct the request")
    return Json(_control(request).beat(named["member"], _version(named), running, named["trouble"]))


@router.post("/claim", openapi_extra=described(_CLAIM))
async def claim(request: Request) -> Response:
    """Leases sessions to a cluster."""
    named = await _fields(request, _CLAIM)
    if not 0 < named["most"] <= MOST_CLAIMED:
        raise UserError(
            f"must be 1 to {MOST_CLAIMED}", field="most", received=named["most"], fix="correct the value"
        )
    answer = await _control(request).claim(
        named["member"], _version(named), named["most"], request.is_disconnected
    )
    return Json(answer)


@router.put("/leases/{lease}/session", openapi_extra=described(body=BYTES))
async def put_session(lease: str, member: str, request: Request, stored: bool = False) -> Response:
    """Receives a finished session; with `stored` it is read from the trajectory store."""
    control = _control(request)
    if stored:
        return Json(await control.fetch_session(member, lease))
    data = await read_body(request, control.settings.max_result_bytes)
    return Json(await control.receive_session(member, lease, data))


@router.post("/leases/{lease}/failure", openapi_extra=described(_FAILURE))
async def put_failure(lease: str, request: Request) -> Response:
    """Receives the failure of a session that could not be run."""
    named = await _fields(request, _FAILURE)
    return Json(_control(request).receive_failure(named["member"], lease, named["cause"]))


@router.post("/leave", openapi_extra=described(_MEMBER))
async def leave(request: Request) -> Response:
    """Unregisters a cluster."""
    return Json(_control(request).leave((await _fields(request, _MEMBER))["member"]))


def _version(named: dict[str, Any]) -> PolicyVersion | None:
    raw = named.get("version")
    if raw is None:
        return None
    try:
        return version_of(raw)
    except WeightUpdateError as error:
        raise UserError(error.message, field=error.field, received=error.received, fix=error.fix) from error
