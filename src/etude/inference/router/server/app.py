"""The router's application: all under /v1 goes on to a replica, the rest is about the router itself."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

import etude
from etude.errors import EtudeError, UserError
from etude.inference.router.members import MemberState
from etude.inference.router.server.events import error_body
from etude.inference.router.server.health import watch
from etude.inference.router.server.hints import read_hints
from etude.inference.router.server.proxy import Opened, Proxy, ReplicaAddress, ReplicaSlowError
from etude.inference.router.types import NoReplicaError
from etude.sandbox.server.app import Measured
from etude.sandbox.server.metrics import Labels

REPLICA_HEADER = "x-etude-replica"
_LOOPBACK = ("127.0.0.1", "::1")
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_DROPPED = frozenset(("content-length", "connection", "transfer-encoding", "keep-alive", "date", "server"))
_RETRY_AFTER_S = "1"

T = TypeVar("T")


class AdminError(UserError):
    """A request for the router's own tables without the right to it."""


class LargeBodyError(UserError):
    """A request over the size limit."""


def build_app(
    proxy: Proxy, replicas: Sequence[ReplicaAddress] = (), admin_token: str | None = None
) -> FastAPI:
    """The application. Keys are the replicas' business: `authorization` goes on to them.

    `admin_token`: who shows it may add and remove replicas; None: whoever asks from this machine.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for address in replicas:
            proxy.join(address)
        watching = asyncio.create_task(watch(proxy))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await proxy.close()

    app = FastAPI(title="Étude router", version=etude.__version__, lifespan=lifespan, openapi_url=None)
    app.state.proxy = proxy
    app.state.admin_token = admin_token
    app.add_api_route("/health", _health, methods=["GET"], name="health")
    app.add_api_route("/ready", _ready, methods=["GET"], name="ready")
    app.add_api_route("/metrics", _metrics, methods=["GET"], name="metrics")
    app.add_api_route("/router/replicas", _list_replicas, methods=["GET"], name="list_replicas")
    app.add_api_route("/router/replicas", _add_replica, methods=["POST"], name="add_replica")
    app.add_api_route("/router/replicas/{name}", _remove_replica, methods=["DELETE"], name="remove_replica")
    app.add_api_route("/v1/{path:path}", _forward, methods=["GET", "POST", "DELETE"], name="forward")
    app.add_exception_handler(EtudeError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_departure)
    app.add_middleware(Measured, metrics=proxy.metrics)
    return app


# ---- what goes on to replicas -------------------------------------------------------------------


async def _forward(request: Request) -> Response:
    proxy: Proxy = request.app.state.proxy
    _check_name(request)
    if proxy.draining:
        raise NoReplicaError("the router is ending", fix="ask another router")
    query = f"?{request.url.query}" if request.url.query else ""
    target = request.scope["raw_path"].decode("ascii") + query
    owner = proxy.place_of(target) if request.method == "GET" else None
    if owner is not None:
        answer = await proxy.fetch_from(owner, target, request.headers.raw)
        return Response(answer.content, answer.status_code, _kept(answer.headers))
    body = await _read_body(request, proxy.config.body_bytes)
    hints = read_hints(request.headers, body, proxy.config.pool)
    opening = proxy.open(hints, request.method, target, request.headers.raw, body)
    opened = await _unless_gone(request, opening)
    headers = {**_kept(opened.response.headers), REPLICA_HEADER: opened.replica}
    if opened.rest is None:
        return Response(opened.first, opened.response.status_code, headers)
    return _Relayed(proxy, opened, headers)


class _Relayed(StreamingResponse):
    """A stream that is let go of though its client left before its first byte was sent."""

    def __init__(self, proxy: Proxy, opened: Opened, headers: dict[str, str]) -> None:
        super().__init__(proxy.relay(opened), opened.response.status_code, headers)
        self._proxy = proxy
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._proxy.discard(self._opened)


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise LargeBodyError(
                "the request is too large", field="body", received=size, fix=f"at most {limit_bytes} bytes"
            )
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, opening: Awaitable[Opened]) -> Opened:
    """The answer, unless the client leaves first: then the replica's work is stopped.

    Raises ClientDisconnect.
    """
    work = asyncio.ensure_future(opening)
    gone = asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _DROPPED}


# ---- about the router ---------------------------------------------------------------------------


async def _health() -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    proxy: Proxy = request.app.state.proxy
    ready = [r for r in proxy.router.replicas.values() if r.ready]
    body = {
        "version": min((r.version for r in ready if r.version is not None), default=None),
        "versions": sorted({r.version for r in ready if r.version is not None}),
        "pool": proxy.config.pool,
        "running": proxy.router.num_in_flight,
        "waiting": 0,
        "outstanding_tokens": sum(r.work for r in proxy.router.replicas.values()),
        "replicas": len(ready),
    }
    return JSONResponse(body, 200 if ready and not proxy.draining else 503)


async def _metrics(request: Request) -> Response:
    proxy: Proxy = request.app.state.proxy
    gauges: dict[tuple[str, Labels], float] = {}
    for name, member in proxy.members.members.items():
        replica = proxy.router.replicas[name]
        labels = (("pool", replica.pool), ("replica", name))
        gauges["etude_router_replica_ready", labels] = float(replica.ready)
        gauges["etude_router_replica_ejected", labels] = float(member.state is MemberState.EJECTED)
        gauges["etude_router_replica_running", labels] = replica.running
        gauges["etude_router_replica_outstanding_tokens", labels] = replica.work
        gauges["etude_router_replica_sessions", labels] = len(replica.sessions)
    gauges["etude_router_spills", ()] = proxy.router.spills
    gauges["etude_router_ejections", ()] = proxy.members.ejections
    return PlainTextResponse(proxy.metrics.text(gauges))


async def _list_replicas(request: Request) -> Response:
    _check_admin(request)
    proxy: Proxy = request.app.state.proxy
    now_s = time.monotonic()
    rows = [
        {
            "name": name,
            "url": proxy.addresses[name].url,
            "state": str(member.state),
            "pool": proxy.router.replicas[name].pool,
            "home": proxy.router.replicas[name].home,
            "version": proxy.router.replicas[name].version,
            "running": proxy.router.replicas[name].running,
            "outstanding_tokens": proxy.router.replicas[name].work,
            "sessions": len(proxy.router.replicas[name].sessions),
            "next_probe_s": round(max(0.0, member.next_probe_s - now_s), 3),
            "cause": member.cause,
        }
        for name, member in proxy.members.members.items()
    ]
    return JSONResponse({"replicas": rows})


async def _add_replica(request: Request) -> Response:
    _check_admin(request)
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("url"), str):
        raise UserError("must be an object with a url", field="body", fix='{"url": ..., "pool": ...}')
    if not isinstance(body.get("pool"), str | None):
        raise UserError("must be a text", field="pool", received=body["pool"], fix='such as "rollout"')
    proxy: Proxy = request.app.state.proxy
    name = proxy.join(ReplicaAddress(body["url"], body.get("pool")))
    return JSONResponse({"name": name}, 201)


async def _remove_replica(request: Request) -> Response:
    _check_admin(request)
    proxy: Proxy = request.app.state.proxy
    name = request.path_params["name"]
    if not proxy.members.leave(name):
        return JSONResponse(error_body("no such replica", "not_found", "invalid_request_error", "name"), 404)
    return JSONResponse({"name": name, "state": "draining"}, 202)


def _check_admin(request: Request) -> None:
    """Raises AdminError."""
    token: str | None = request.app.state.admin_token
    if token is not None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise AdminError("the admin token is missing or wrong", field="authorization")
        return
    if not _is_local(request):
        raise AdminError("only this machine may ask", fix="start the router with an admin token")
    _check_name(request)


def _is_local(request: Request) -> bool:
    return request.client is not None and request.client.host in _LOOPBACK


def _check_name(request: Request) -> None:
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


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    status, code, kind = 502, "replica_lost", "server_error"
    headers: dict[str, str] = {}
    if isinstance(error, AdminError):
        status, code, kind = 401, "unauthorised", "authentication_error"
    elif isinstance(error, LargeBodyError):
        status, code, kind = 413, "request_too_large", "invalid_request_error"
    elif isinstance(error, UserError):
        status, code, kind = 400, "invalid_request", "invalid_request_error"
    elif isinstance(error, NoReplicaError):
        status, code, headers = 503, "no_replica", {"retry-after": _RETRY_AFTER_S}
    elif isinstance(error, ReplicaSlowError):
        status, code = 504, "replica_slow"
    return JSONResponse(error_body(str(error), code, kind, error.field), status, headers)


async def _on_departure(request: Request, error: Exception) -> Response:
    """A client that has left; nobody reads this."""
    return Response(status_code=499)
