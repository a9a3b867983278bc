"""The router's own tables over HTTP: who is a replica, of which pool, and which version gets which share.

GET    /router/replicas               all of them, with their state
POST   /router/replicas               {"url": ..., "pool": ...}: one joins
PATCH  /router/replicas/NAME          {"pool": ...}: it belongs to that pool from now on
DELETE /router/replicas/NAME          it finishes what it has begun, and leaves
POST   /router/replicas/NAME/lend     {"pool": ...}: it works for that pool until it is recalled, by hand
POST   /router/replicas/NAME/recall   it works for its own pool, by hand; answers when it serves again
POST   /router/replicas/NAME/release  the rules of lending decide again
GET    /router/borrowers              the runs that borrow replicas
PUT    /router/borrowers/NAME         {"pool", "wanted", "lease_s", ...}: a run checks in; answers its loans
DELETE /router/borrowers/NAME         a run wants nothing more
GET    /router/arms                   shares of the sessions by version
PUT    /router/arms                   {"run@7": 0.9, "run@8": 0.1}; {} gives all versions alike
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.errors import ConfigError, UserError
from etude.inference.router.borrowing import Borrower
from etude.inference.router.members import Member
from etude.inference.router.server.loans import LoanKeeper
from etude.inference.router.server.proxy import Proxy, ReplicaAddress
from etude.serving.access import AccessError, bearer_of, find_token
from etude.serving.application import read_body
from etude.serving.describing import described
from etude.serving.json_bodies import parse_json
from etude.serving.listening import is_loopback

router = APIRouter(prefix="/router")
_BODY_BYTES = 1 << 20
_MOST = 1e15
"""Of any number here."""


class NoSuchReplicaError(UserError):
    """A replica that is not there."""


@router.get("/replicas")
async def list_replicas(request: Request) -> Response:
    """All replicas, with their state."""
    proxy = _proxy_of(request)
    rows = [_row(proxy, name, member) for name, member in proxy.members.members.items()]
    return JSONResponse({"replicas": rows})


@router.post(
    "/replicas", status_code=201, openapi_extra=described({"url": (str,), "pool": (str, type(None))})
)
async def add_replica(request: Request) -> Response:
    """A replica joins; it gets requests after its first good probe."""
    proxy = _proxy_of(request)
    body = await _body_of(request, {"url", "pool"})
    url, pool = _text(body, "url"), None if body.get("pool") is None else _text(body, "pool")
    return JSONResponse({"name": proxy.join(ReplicaAddress(url, pool))}, 201)


@router.patch("/replicas/{name}", openapi_extra=described({"pool": (str,)}))
async def move_replica(request: Request, name: str) -> Response:
    """A replica changes its pool for good: new requests of that pool alone reach it from now on."""
    proxy = _proxy_of(request)
    _check_known(proxy, name)
    pool = _text(await _body_of(request, {"pool"}), "pool")
    proxy.router.move(name, pool)
    return JSONResponse(_row(proxy, name, proxy.members.members[name]))


@router.post("/replicas/{name}/lend", openapi_extra=described({"pool": (str,)}))
async def lend_replica(request: Request, name: str) -> Response:
    """A replica works for another pool until somebody recalls it."""
    proxy = _proxy_of(request)
    _check_known(proxy, name)
    pool = _text(await _body_of(request, {"pool"}), "pool")
    _set_by_hand(proxy, name, pool)
    return JSONResponse(_row(proxy, name, proxy.members.members[name]))


@router.post("/replicas/{name}/recall")
async def recall_replica(request: Request, name: str) -> Response:
    """A replica works for its own pool again, and is not lent until somebody does, or releases it."""
    proxy = _proxy_of(request)
    _check_known(proxy, name)
    _set_by_hand(proxy, name, proxy.router.replicas[name].home)
    if proxy.loans is not None:
        await proxy.loans.until_home(name)
        _check_known(proxy, name)
    return JSONResponse(_row(proxy, name, proxy.members.members[name]))


@router.post("/replicas/{name}/release")
async def release_replica(request: Request, name: str) -> Response:
    """The rules of lending decide over a replica again."""
    proxy = _proxy_of(request)
    _check_known(proxy, name)
    proxy.router.replicas[name].by_hand = False
    return JSONResponse(_row(proxy, name, proxy.members.members[name]))


def _set_by_hand(proxy: Proxy, name: str, pool: str) -> None:
    proxy.router.replicas[name].by_hand = True
    if proxy.router.replicas[name].pool != pool:
        proxy.router.lend(name, pool)
        proxy.metrics.count("etude_router_moves", pool=pool)


@router.delete("/replicas/{name}", status_code=202)
async def remove_replica(request: Request, name: str) -> Response:
    """A replica is drained, and leaves."""
    proxy = _proxy_of(request)
    _check_known(proxy, name)
    proxy.members.leave(name)
    return JSONResponse({"name": name, "state": "draining"}, 202)


@router.get("/arms")
async def arms(request: Request) -> Response:
    """Shares of the sessions by version; none: all versions alike."""
    return JSONResponse(_proxy_of(request).router.arms)


@router.put("/arms", openapi_extra=described(body="application/json"))
async def set_arms(request: Request) -> Response:
    """Other shares. Sessions move only as far as the shares do."""
    proxy = _proxy_of(request)
    body = await _body_of(request, None)
    for version, share in body.items():
        known = isinstance(share, int | float) and not isinstance(share, bool)
        if not version or not known or not 0 <= share <= _MOST:
            raise UserError(
                "must be a share, a number from 0 on",
                field=version or "body",
                received=share,
                fix='send {"run@7": 0.9, "run@8": 0.1}',
            )
    proxy.router.arms = {version: float(share) for version, share in body.items()}
    return JSONResponse(proxy.router.arms)


# ---- runs that borrow ---------------------------------------------------------------------------

_BORROWER_FIELDS = {"pool", "wanted", "lease_s", "load_tokens", "refused", "over"}


@router.get("/borrowers")
async def borrowers(request: Request) -> Response:
    """The runs that borrow replicas, and what they have."""
    keeper = _keeper_of(_proxy_of(request))
    rows = [
        {
            "name": one.name,
            "pool": one.pool,
            "wanted": one.wanted,
            "load_tokens": one.load_tokens,
            "replicas": [loan.replica for loan in keeper.books.granted(one.name)],
        }
        for one in keeper.books.borrowers.values()
    ]
    return JSONResponse({"borrowers": rows, "last_recall_s": keeper.last_recall_s})


@router.put("/borrowers/{name}", openapi_extra=described(body="application/json"))
async def check_in(request: Request, name: str) -> Response:
    """A run says what it wants, and learns what it has."""
    proxy = _proxy_of(request, borrowing=True)
    keeper = _keeper_of(proxy)
    body = await _body_of(request, _BORROWER_FIELDS)
    lease_s = _number(body, "lease_s", 15.0)
    keeper.books.check_in(
        Borrower(
            name,
            _text(body, "pool"),
            int(_number(body, "wanted", 0.0)),
            min(max(lease_s, 0.1), 3600.0),
            time.monotonic(),
            _number(body, "load_tokens", 0.0),
            _names(body, "refused"),
            _names(body, "over"),
        )
    )
    keeper.tick(time.monotonic())
    loans = [
        {"id": one.id, "replica": one.replica, "url": proxy.addresses[one.replica].url, "token": one.token}
        for one in keeper.books.granted(name)
        if one.replica in proxy.addresses
    ]
    return JSONResponse({"loans": loans})


@router.delete("/borrowers/{name}")
async def check_out(request: Request, name: str) -> Response:
    """A run gives all back."""
    keeper = _keeper_of(_proxy_of(request, borrowing=True))
    known = keeper.books.leave(name)
    keeper.tick(time.monotonic())
    return JSONResponse({"name": name, "known": known})


def _keeper_of(proxy: Proxy) -> LoanKeeper:
    if proxy.loans is None:
        raise ConfigError(
            "this router lends no replicas to runs", field="path", fix="start it with --replica-token-file"
        )
    return proxy.loans


def _names(body: dict[str, Any], field: str) -> frozenset[str]:
    value = body.get(field, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError("must be a list of names", field=field, received=value, fix="correct the value")
    return frozenset(value)


def _number(body: dict[str, Any], field: str, default: float) -> float:
    value = body.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise UserError("must be a number from 0 on", field=field, received=value, fix="correct the value")
    return float(value)


# ---- rights and bodies --------------------------------------------------------------------------


def _proxy_of(request: Request, *, borrowing: bool = False) -> Proxy:
    """The proxy, for those who may change it, or with `borrowing` may borrow. Raises AccessError."""
    _check_admin(request, request.app.state.borrower_token if borrowing else None)
    return request.app.state.proxy


def _row(proxy: Proxy, name: str, member: Member) -> dict[str, Any]:
    replica = proxy.router.replicas[name]
    return {
        "name": name,
        "url": proxy.addresses[name].url,
        "state": str(member.state),
        "pool": replica.pool,
        "home": replica.home,
        "by_hand": replica.by_hand,
        "borrower": _borrower_of(proxy, name),
        "version": replica.version,
        "running": replica.running,
        "outstanding_tokens": replica.work,
        "sessions": len(replica.sessions),
        "next_probe_s": round(max(0.0, member.next_probe_s - time.monotonic()), 3),
        "cause": member.cause,
    }


def _borrower_of(proxy: Proxy, name: str) -> str | None:
    loan = proxy.loans.books.lent.get(name) if proxy.loans is not None else None
    return loan.borrower if loan is not None else None


def _check_known(proxy: Proxy, name: str) -> None:
    if name not in proxy.members.members:
        known = ", ".join(proxy.members.members) or None
        fix = None if known is None else f"one of {known}"
        raise NoSuchReplicaError("no such replica", field="name", received=name, fix=fix)


async def _body_of(request: Request, known: set[str] | None) -> dict[str, Any]:
    """The JSON object of a request; with `known`, of these fields alone. Raises UserError."""
    data = await read_body(request, _BODY_BYTES)
    try:
        body = parse_json(data)
    except UserError:
        body = None
    if not isinstance(body, dict):
        raise UserError(
            "must be a JSON object", field="body", fix="send an object, as docs/routing.md has it"
        )
    for name in body.keys() - known if known is not None else ():
        fix = f"send {' and '.join(sorted(known or ()))}"
        raise UserError("there is no such field", field=name, received=body[name], fix=fix)
    return body


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise UserError("must be a text", field=field, received=value, fix="name it")
    return value


def _check_admin(request: Request, other: str | None = None) -> None:
    """Raises AccessError. `other`: a token that does as well here."""
    known = [one for one in (request.app.state.admin_token, other) if one is not None]
    if known and find_token(dict.fromkeys(known, True), bearer_of(request.headers)) is None:
        raise AccessError("the admin token is missing or wrong", field="authorization")
    if not known and (request.client is None or not is_loopback(request.client.host)):
        raise AccessError("only this machine may ask", fix="start the router with an admin token")
