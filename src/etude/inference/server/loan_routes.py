"""The routes of a loan: its owner's with the administrator's token, the run's with the loan's own.

POST   /admin/loan {"borrower", "lease_s"}   lends; answers with the loan's id and token
GET    /admin/loan                           where it stands
DELETE /admin/loan                           recalls; answers when the replica serves users again
POST   /loan/begin {"store"}                 the run begins; answers with what the engine is
POST   /loan/stage {"manifest"}, /loan/activate {"version", "kv"}, /loan/score, /loan/exchange, /loan/poll
POST   /loan/forget                          a client of the run's, CLIENT_HEADER, is gone
POST   /loan/pulse                           renews the lease; answers with what the engine has done
POST   /loan/end                             gives the replica back
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.errors import EtudeError
from etude.inference import wire
from etude.inference.headers import CLIENT_HEADER
from etude.inference.server.admin import kv_policy, read_manifest, read_version
from etude.inference.server.errors import ForbiddenError, LoanOverError
from etude.inference.server.loans import Loan, LoanDesk
from etude.inference.server.requests import body_of, check_admin, data_of, state_of
from etude.serving.access import bearer_of
from etude.serving.application import Binary
from etude.serving.describing import BYTES, answering, described
from etude.tokens.chat.fields import text, wrong

router = APIRouter()
_BINARY = "application/octet-stream"
_FAILED = 422
"""With an error of the engine's in the body, which the client raises as it is."""
FAILED = answering("application/json", status=_FAILED)
_Work = Callable[[Request, LoanDesk, Loan], Awaitable[Response]]


# ---- the owner's --------------------------------------------------------------------------------


@router.post("/admin/loan", tags=["admin"], status_code=201, openapi_extra=described(body="application/json"))
async def lend(request: Request) -> Response:
    """Lends the replica."""
    desk = _owned(request)
    body = await body_of(request)
    lease_s = body.get("lease_s", 15.0)
    if not isinstance(lease_s, int | float) or not (0.1 <= lease_s <= 3600 and math.isfinite(lease_s)):
        raise wrong("lease_s", lease_s, "seconds from 0.1 to 3600")
    loan = await desk.lend(text(body.get("borrower"), "borrower"), float(lease_s))
    return JSONResponse({"id": loan.id, "token": loan.token, **_standing(desk)}, 201)


@router.get("/admin/loan", tags=["admin"])
async def standing(request: Request) -> Response:
    """Where the replica stands."""
    return JSONResponse(_standing(_owned(request)))


@router.delete("/admin/loan", tags=["admin"])
async def recall(request: Request) -> Response:
    """Recalls the replica."""
    desk = _owned(request)
    await desk.recall("its owner recalls it")
    return JSONResponse(_standing(desk))


def _owned(request: Request) -> LoanDesk:
    """The desk, for an administrator."""
    check_admin(request)
    return _desk_of(request)


def _standing(desk: LoanDesk) -> dict[str, Any]:
    version = desk.home.current()
    return {
        "state": str(desk.state),
        "borrower": None if desk.loan is None else desk.loan.borrower,
        "version": None if version is None else str(version),
        "last_return_s": desk.last_return_s,
        "trouble": desk.home.trouble or None,
    }


# ---- the run's ----------------------------------------------------------------------------------


def _lent(**options: Any) -> Callable[[_Work], _Work]:
    """A route of the loan that the request's token opens, named as the function. An error of the engine's
    goes into the answer. `options`: of the route."""

    def register(work: _Work) -> _Work:
        async def route(request: Request) -> Response:
            desk = _desk_of(request)
            loan = desk.find(bearer_of(request.headers))
            try:
                return await work(request, desk, loan)
            except LoanOverError:
                raise
            except EtudeError as error:
                metrics = state_of(request).metrics
                metrics.count("etude_serve_requests", endpoint="loan", status=str(_FAILED))
                return JSONResponse({"error": wire.error_row(error)}, _FAILED)

        route.__name__, route.__doc__ = work.__name__, work.__doc__
        router.post(f"/loan/{work.__name__}", tags=["loan"], responses=FAILED, **options)(route)
        return work

    return register


@_lent(openapi_extra=described(body="application/json"))
async def begin(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """The run begins."""
    store = text((await body_of(request)).get("store"), "store")
    return JSONResponse(await desk.begin(loan, store))


@_lent(openapi_extra=described(body="application/json"))
async def stage(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """Takes a version of the run beside the one in service."""
    await desk.stage_rollout(loan, read_manifest((await body_of(request)).get("manifest")))
    return JSONResponse({})


@_lent(openapi_extra=described(body="application/json"))
async def activate(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """Puts a version of the run into service, when the last user has gone."""
    body = await body_of(request)
    version = read_version(body.get("version"))
    await desk.activate_rollout(loan, version, kv_policy(body.get("kv", "recompute")))
    return JSONResponse(_usage(request))


@_lent(status_code=204, openapi_extra=described(body=BYTES))
async def exchange(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """What sessions want of the engine."""
    desk.exchange(loan, _client_of(request), wire.unpack_commands(await data_of(request)))
    return Response(status_code=204)


@_lent(response_class=Binary, openapi_extra=described(body=BYTES))
async def poll(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """What the engine has to tell."""
    events = await desk.poll(loan, _client_of(request))
    return Response(wire.pack_events(events), media_type=_BINARY)


@_lent(status_code=204, openapi_extra=described(body=BYTES))
async def forget(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """A client is gone."""
    await desk.forget(loan, _client_of(request))
    return Response(status_code=204)


@_lent(response_class=Binary, openapi_extra=described(body=BYTES))
async def score(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """Log-probabilities of given tokens."""
    tokens, version = wire.unpack_question(await data_of(request))
    return Response(wire.pack_scores(await desk.score(loan, tokens, version)), media_type=_BINARY)


@_lent()
async def pulse(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """Renews the lease."""
    desk.renew(loan)
    return JSONResponse(_usage(request))


@_lent()
async def end(request: Request, desk: LoanDesk, loan: Loan) -> Response:
    """Gives the replica back."""
    if desk.loan is loan:
        await desk.recall(f"{loan.borrower} gives it back")
    return JSONResponse(_standing(desk))


def _desk_of(request: Request) -> LoanDesk:
    desk = state_of(request).loans
    if desk is None:
        raise ForbiddenError("this replica is not lent", field="path", fix="start it with --admin-token-file")
    return desk


def _client_of(request: Request) -> str:
    name = request.headers.get(CLIENT_HEADER, "")
    if len(name) > 64:
        raise wrong(CLIENT_HEADER, name[:32], "at most 64 characters")
    return name


def _usage(request: Request) -> dict[str, float]:
    return dict(state_of(request).engine.usage())
