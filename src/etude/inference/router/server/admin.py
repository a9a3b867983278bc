"""The router's own tables over HTTP: who is a replica, of which pool, and which version gets which share.

GET    /router/replicas               all of them, with their state
POST   /router/replicas               {"url": ..., "pool": ...}: one joins
PATCH  /router/replicas/NAME          {"pool": ...}: it works for that pool from now on
DELETE /router/replicas/NAME          it finishes what it has begun, and leaves
GET    /router/arms                   shares of the sessions by version
PUT    /router/arms                   {"run@7": 0.9, "run@8": 0.1}; {} gives all versions alike
"""

from __future__ import annotations

import hmac
import math
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.errors import UserError
from etude.inference.router.members import Member
from etude.inference.router.server.proxy import Proxy, ReplicaAddress

_LOOPBACK = ("127.0.0.1", "::1")
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")

router = APIRouter(prefix="/router")


class AdminError(UserError):
    """A request for the router's own tables without the right to it."""


class NoSuchReplicaError(UserError):
    """A replica that is not there."""


@router.get("/replicas")
async def list_replicas(request: Request) -> Response:
    """All replicas, with their state."""
    proxy = _proxy_of(request)
    rows = [_row(proxy, name, member) for name, member in proxy.members.members.items()]
    return JSONResponse({"replicas": rows})


@router.post("/replicas")
async def add_replica(request: Request) -> Response:
    """A replica joins; it gets requests after its first good probe."""
    proxy = _proxy_of(request)
    body = await _body_of(request, {"url", "pool"})
    url, pool = _text(body, "url"), None if body.get("pool") is None else _text(body, "pool")
    return JSONResponse({"name": proxy.join(ReplicaAddress(url, pool))}, 201)


@router.patch("/replicas/{name}")
async def move_replica(request: Request, name: str) -> Response:
    """A replica changes its pool for good: new requests of that pool alone reach it from now on."""
    proxy = _proxy_of(request)
    _check_known(proxy, name)
    pool = _text(await _body_of(request, {"pool"}), "pool")
    proxy.router.move(name, pool)
    return JSONResponse(_row(proxy, name, proxy.members.members[name]))


@router.delete("/replicas/{name}")
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


@router.put("/arms")
async def set_arms(request: Request) -> Response:
    """Other shares. Sessions move only as far as the shares do."""
    proxy = _proxy_of(request)
    body = await _body_of(request, None)
    for version, share in body.items():
        known = isinstance(share, int | float) and not isinstance(share, bool)
        if not version or not known or not math.isfinite(share) or share < 0:
            raise UserError(
                "must be a share, a number from 0 on",
                field=version or "body",
                received=share,
                fix='send {"run@7": 0.9, "run@8": 0.1}',
            )
    proxy.router.arms = {version: float(share) for version, share in body.items()}
    return JSONResponse(proxy.router.arms)


def _proxy_of(request: Request) -> Proxy:
    """The proxy, for those who may change it. Raises AdminError."""
    _check_admin(request)
    return request.app.state.proxy


def _row(proxy: Proxy, name: str, member: Member) -> dict[str, Any]:
    replica = proxy.router.replicas[name]
    return {
        "name": name,
        "url": proxy.addresses[name].url,
        "state": str(member.state),
        "pool": replica.pool,
        "home": replica.home,
        "version": replica.version,
        "running": replica.running,
        "outstanding_tokens": replica.work,
        "sessions": len(replica.sessions),
        "next_probe_s": round(max(0.0, member.next_probe_s - time.monotonic()), 3),
        "cause": member.cause,
    }


def _check_known(proxy: Proxy, name: str) -> None:
    if name not in proxy.members.members:
        known = ", ".join(proxy.members.members) or None
        fix = None if known is None else f"one of {known}"
        raise NoSuchReplicaError("no such replica", field="name", received=name, fix=fix)


async def _body_of(request: Request, known: set[str] | None) -> dict[str, Any]:
    """The JSON object of a request; with `known`, of these fields alone. Raises UserError."""
    try:
        body = await request.json()
    except (ValueError, RecursionError):
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


def _check_admin(request: Request) -> None:
    """Raises AdminError."""
    token: str | None = request.app.state.admin_token
    if token is not None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode()):
            raise AdminError("the admin token is missing or wrong", field="authorization")
        return
    if not _is_local(request):
        raise AdminError("only this machine may ask", fix="start the router with an admin token")
    check_name(request)


def _is_local(request: Request) -> bool:
    return request.client is not None and request.client.host in _LOOPBACK


def check_name(request: Request) -> None:
    """Raises AdminError for a request from this machine, without a key, by a foreign name.

    A web page can point its own host name at the loopback address; replicas see the router's name only.
    """
    if not _is_local(request) or "authorization" in request.headers:
        return
    origin = request.headers.get("origin")
    for field, host in (("host", request.headers.get("host", "")), ("origin", origin)):
        if host is not None and _name(host.rpartition("//")[2]) not in _LOOPBACK_NAMES:
            raise AdminError(
                "only loopback names reach this router without a key", field=field, received=host
            )


def _name(host: str) -> str:
    """A host without its port."""
    return host if host.endswith("]") else host.rpartition(":")[0] or host
