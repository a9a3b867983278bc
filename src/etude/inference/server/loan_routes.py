"""Routes of loans: the administrator's, with the admin token, and the borrowing run's, with the loan's token.

POST   /admin/loan {"borrower", "lease_s"}   lends; answers the loan's id and token
GET    /admin/loan                           the loan state
DELETE /admin/loan                           recalls; answers when the replica serves users again
POST   /loan/METHOD                          a call by the run: arguments and answer as in `wire`
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.errors import EtudeError
from etude.inference import wire
from etude.inference.server.errors import ForbiddenError, LoanOverError
from etude.inference.server.loans import LoanDesk
from etude.inference.server.requests import body_of, check_admin, count_answer, data_of, state_of
from etude.records import PolicyVersion, WeightManifest
from etude.serving.access import bearer_of
from etude.serving.application import Binary
from etude.serving.describing import BYTES, answering, described
from etude.serving.errors import RouteError
from etude.tokens.chat.fields import text, wrong

router = APIRouter()
_FAILED = 422
"""Status of an engine error in the body, which the client raises unchanged."""
_CALLS: Mapping[str, tuple[Callable[..., Awaitable[Any]], tuple[type, ...]]] = {
    "begin": (LoanDesk.begin, (str,)),
    "stage": (LoanDesk.stage, (WeightManifest,)),
    "activate": (LoanDesk.activate, (PolicyVersion, str)),
    "exchange": (LoanDesk.exchange, (list, str)),
    "poll": (LoanDesk.poll, (str,)),
    "forget": (LoanDesk.forget, (str,)),
    "score": (LoanDesk.score, (np.ndarray, PolicyVersion)),
    "pulse": (LoanDesk.pulse, ()),
    "end": (LoanDesk.end, ()),
}
"""Methods that a run may call, with the types of their arguments."""


@router.post("/admin/loan", tags=["admin"], status_code=201, openapi_extra=described(body="application/json"))
async def lend(request: Request) -> Response:
    """Lends the replica."""
    desk = _owned(request)
    body = await body_of(request)
    lease_s = body.get("lease_s", 15.0)
    if not isinstance(lease_s, int | float) or not (0.1 <= lease_s <= 3600 and math.isfinite(lease_s)):
        raise wrong("lease_s", lease_s, "seconds from 0.1 to 3600")
    loan = await desk.lend(text(body.get("borrower"), "borrower"), float(lease_s))
    return JSONResponse({"id": loan.id, "token": loan.token, **desk.status()}, 201)


@router.get("/admin/loan", tags=["admin"])
async def standing(request: Request) -> Response:
    """The loan state of the replica."""
    return JSONResponse(_owned(request).status())


@router.delete("/admin/loan", tags=["admin"])
async def recall(request: Request) -> Response:
    """Recalls the replica."""
    desk = _owned(request)
    await desk.recall("its owner recalled it")
    return JSONResponse(desk.status())


@router.post(
    "/loan/{method}",
    tags=["loan"],
    response_class=Binary,
    responses=answering("application/json", status=_FAILED),
    openapi_extra=described(body=BYTES),
)
async def call(request: Request, method: str) -> Response:
    """A method call by the borrowing run. Engine errors are returned in the answer."""
    desk = _desk_of(request)
    loan = desk.find(bearer_of(request.headers))
    if method not in _CALLS:
        raise RouteError("no such call", field="path", received=method, fix=f"use one of {', '.join(_CALLS)}")
    work, kinds = _CALLS[method]
    try:
        data = await data_of(request)
        arguments = wire.unpack(data) if data else []
        if len(arguments) != len(kinds) or not all(map(isinstance, arguments, kinds)):
            raise wire.DamagedMessageError("the arguments do not match the call", field=method)
        return Binary(wire.pack(await work(desk, loan, *arguments)))
    except LoanOverError:
        raise
    except EtudeError as error:
        count_answer(request, _FAILED)
        return JSONResponse({"error": wire.error_row(error)}, _FAILED)


def _owned(request: Request) -> LoanDesk:
    """The loan desk, if the request is an administrator's."""
    check_admin(request)
    return _desk_of(request)


def _desk_of(request: Request) -> LoanDesk:
    desk = state_of(request).loans
    if desk is None:
        raise ForbiddenError("this replica is not lent", field="path", fix="start it with --admin-token-file")
    return desk
