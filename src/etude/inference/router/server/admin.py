"""Admin API of the router: replicas and their pools, borrowing runs, and traffic shares by version.

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
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, RootModel

from etude.config import parse_section
from etude.config.base import Section
from etude.config.routing import Name
from etude.errors import ConfigError, UserError
from etude.inference.router.borrowing import Borrower, Number
from etude.inference.router.server.loans import LoanKeeper
from etude.inference.router.server.proxy import Proxy, ReplicaAddress
from etude.inference.router.types import Replica
from etude.serving.access import AccessError, bearer_of, find_token
from etude.serving.application import read_body
from etude.serving.describing import described
from etude.serving.json_bodies import parse_json
from etude.serving.listening import is_loopback

router = APIRouter(prefix="/router")
_BODY_BYTES = 1 << 20
AnyBody = TypeVar("AnyBody", bound=BaseModel)


class NewReplica(Section):
    """Body of POST /router/replicas."""

    url: Name
    pool: Name | None = None


class PoolChoice(Section):
    """Body that names a pool."""

    pool: Name


class Arms(RootModel[dict[Name, Number]]):
    """Share of the sessions by version: the arms of an A/B test."""

    model_config = ConfigDict(strict=True)


class NoSuchReplicaError(UserError):
    """No replica has the given name."""


@router.get("/replicas")
async def list_replicas(request: Request) -> Response:
    """All replicas, with their state."""
    proxy = _proxy_of(request)
    return JSONResponse({"replicas": [_row(proxy, replica) for replica in proxy.router.replicas.values()]})


@router.post(
    "/replicas", status_code=201, openapi_extra=described({"url": (str,), "pool": (str, type(None))})
)
async def add_replica(request: Request) -> Response:
    """A replica joins; it gets requests after its first good probe."""
    proxy = _proxy_of(request)
    new = await _read(request, NewReplica)
    return JSONResponse({"name": proxy.join(ReplicaAddress(new.url, new.pool))}, 201)


@router.patch("/replicas/{name}", openapi_extra=described({"pool": (str,)}))
async def move_replica(request: Request, name: str) -> Response:
    """Changes a replica's home pool: from now on it only gets new requests of that pool."""
    proxy, replica = _replica_of(request, name)
    proxy.router.move(name, (await _read(request, PoolChoice)).pool)
    return JSONResponse(_row(proxy, replica))


@router.post("/replicas/{name}/lend", openapi_extra=described({"pool": (str,)}))
async def lend_replica(request: Request, name: str) -> Response:
    """A replica works for another pool until it is recalled by hand."""
    proxy, replica = _replica_of(request, name)
    _set_by_hand(proxy, replica, (await _read(request, PoolChoice)).pool)
    return JSONResponse(_row(proxy, replica))


@router.post("/replicas/{name}/recall")
async def recall_replica(request: Request, name: str) -> Response:
    """A replica works for its own pool again, and is not lent by rules until it is released."""
    proxy, replica = _replica_of(request, name)
    _set_by_hand(proxy, replica, replica.home)
    if proxy.loans is not None:
        await proxy.loans.wait_until_returned(name)
        proxy, replica = _replica_of(request, name)
    return JSONResponse(_row(proxy, replica))


@router.post("/replicas/{name}/release")
async def release_replica(request: Request, name: str) -> Response:
    """The rules of lending decide over a replica again."""
    proxy, replica = _replica_of(request, name)
    replica.by_hand = False
    return JSONResponse(_row(proxy, replica))


def _set_by_hand(proxy: Proxy, replica: Replica, pool: str) -> None:
    replica.by_hand = True
    if replica.pool != pool:
        proxy.router.lend(replica.name, pool)
        proxy.metrics.count("etude_router_moves", pool=pool)


@router.delete("/replicas/{name}", status_code=202)
async def remove_replica(request: Request, name: str) -> Response:
    """Drains a replica, which is then removed."""
    proxy, _ = _replica_of(request, name)
    proxy.members.drain(name)
    return JSONResponse({"name": name, "state": "draining"}, 202)


@router.get("/arms")
async def arms(request: Request) -> Response:
    """Shares of the sessions by version; none: all versions alike."""
    return JSONResponse(_proxy_of(request).router.arms)


@router.put("/arms", openapi_extra=described(body="application/json"))
async def set_arms(request: Request) -> Response:
    """Sets the shares. As few sessions move as the change requires."""
    proxy = _proxy_of(request)
    proxy.router.arms = (await _read(request, Arms)).root
    return JSONResponse(proxy.router.arms)


# ---- runs that borrow ---------------------------------------------------------------------------


@router.get("/borrowers")
async def borrowers(request: Request) -> Response:
    """The runs that borrow replicas, and their loans."""
    keeper = _keeper_of(_proxy_of(request))
    rows = [
        {
            "name": name,
            "pool": run.pool,
            "wanted": run.wanted,
            "load_tokens": run.load_tokens,
            "replicas": [loan.replica for loan in keeper.book.granted_to(name)],
        }
        for name, run in keeper.book.borrowers.items()
    ]
    return JSONResponse({"borrowers": rows, "last_recall_s": keeper.last_recall_s})


@router.put("/borrowers/{name}", openapi_extra=described(body="application/json"))
async def check_in(request: Request, name: str) -> Response:
    """A run checks in with what it wants; answers its granted loans."""
    proxy = _proxy_of(request, borrowing=True)
    keeper = _keeper_of(proxy)
    borrower = await _read(request, Borrower)
    keeper.book.check_in(name, borrower, time.monotonic())
    keeper.tick(time.monotonic())
    addresses = proxy.addresses
    loans = [
        {"id": loan.id, "replica": loan.replica, "url": addresses[loan.replica].url, "token": loan.token}
        for loan in keeper.book.granted_to(name)
        if loan.replica in addresses
    ]
    return JSONResponse({"loans": loans})


@router.delete("/borrowers/{name}")
async def check_out(request: Request, name: str) -> Response:
    """A run returns all its loans."""
    keeper = _keeper_of(_proxy_of(request, borrowing=True))
    known = keeper.book.check_out(name)
    keeper.tick(time.monotonic())
    return JSONResponse({"name": name, "known": known})


def _keeper_of(proxy: Proxy) -> LoanKeeper:
    if proxy.loans is None:
        raise ConfigError(
            "this router lends no replicas to runs", field="path", fix="start it with --replica-token-file"
        )
    return proxy.loans


# ---- rights and bodies --------------------------------------------------------------------------


def _proxy_of(request: Request, *, borrowing: bool = False) -> Proxy:
    """The proxy, if the request may administrate it, or with `borrowing`, borrow. Raises AccessError."""
    state = request.app.state
    accepted = (state.admin_token, state.borrower_token if borrowing else None)
    known = {token: True for token in accepted if token is not None}
    if known and find_token(known, bearer_of(request.headers)) is None:
        raise AccessError("the admin token is missing or wrong", field="authorization")
    if not known and (request.client is None or not is_loopback(request.client.host)):
        raise AccessError("only this machine may send requests", fix="start the router with an admin token")
    return state.proxy


def _replica_of(request: Request, name: str) -> tuple[Proxy, Replica]:
    """The proxy, if the request may administrate it, and one of its replicas. Raises AccessError and
    NoSuchReplicaError."""
    proxy = _proxy_of(request)
    replica = proxy.router.replicas.get(name)
    if replica is None:
        known = ", ".join(proxy.router.replicas) or None
        fix = None if known is None else f"one of {known}"
        raise NoSuchReplicaError("no such replica", field="name", received=name, fix=fix)
    return proxy, replica


def _row(proxy: Proxy, replica: Replica) -> dict[str, Any]:
    loan = proxy.loans.book.loans.get(replica.name) if proxy.loans is not None else None
    return {
        "name": replica.name,
        "url": proxy.addresses[replica.name].url,
        "state": str(replica.state),
        "pool": replica.pool,
        "home": replica.home,
        "by_hand": replica.by_hand,
        "borrower": loan.borrower if loan is not None else None,
        "version": replica.version,
        "running": replica.running,
        "outstanding_tokens": replica.work,
        "sessions": len(replica.sessions),
        "next_probe_s": round(max(0.0, replica.next_probe_s - time.monotonic()), 3),
        "cause": replica.cause,
    }


async def _read(request: Request, kind: type[AnyBody]) -> AnyBody:
    """The body of a request. Raises UserError."""
    body = parse_json(await read_body(request, _BODY_BYTES))
    if not isinstance(body, dict):
        raise UserError("must be a JSON object", field="body", fix="send an object as in docs/routing.md")
    return parse_section(kind, body)
