"""The router as an application and as a process: forwards API requests to replicas; health, metrics and admin
routes; listening address and shutdown.

The first SIGTERM (or SIGINT) drains: `/ready` reports it, answers in progress are finished, then the process
ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError, UserError
from etude.inference.router.server import admin
from etude.inference.router.server.admin import NoSuchReplicaError
from etude.inference.router.server.health import watch
from etude.inference.router.server.hints import read_hints
from etude.inference.router.server.proxy import OpenAnswer, Proxy, ReplicaAddress, ReplicaSlowError
from etude.inference.router.types import NoReplicaError, ReplicaState
from etude.kit.tasks import off_loop
from etude.serving.access import AccessError
from etude.serving.application import build_application, read_body, unless_disconnected
from etude.serving.describing import answering
from etude.serving.errors import BodyTooLargeError, OpenAIErrors, RouteError
from etude.serving.listening import check_host, open_listeners
from etude.serving.metrics import Labels
from etude.serving.process import Draining, run_server

SERVER = "router"
"""Its name in messages."""
REPLICA_HEADER = "x-etude-replica"
_DROPPED = frozenset(("content-length", "connection", "transfer-encoding", "keep-alive", "date", "server"))

_FORWARDED: dict[int | str, dict[str, Any]] = {
    **answering("application/json", "text/event-stream", "application/octet-stream"),
    "default": {"description": "What the replica answers"},
}

T = TypeVar("T")


ERRORS = OpenAIErrors(
    (
        (AccessError, 401, "authentication_error", "unauthorised"),
        (NoSuchReplicaError, 404, "invalid_request_error", "not_found"),
        (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
        (UserError, 400, "invalid_request_error", "invalid_request"),
        (NoReplicaError, 503, "server_error", "no_replica"),
        (ReplicaSlowError, 504, "server_error", "replica_slow"),
        (EtudeError, 502, "server_error", "replica_lost"),
    )
)


def build_app(
    proxy: Proxy,
    replicas: Sequence[ReplicaAddress] = (),
    admin_token: str | None = None,
    borrower_token: str | None = None,
) -> FastAPI:
    """The application. Replicas check API keys: `authorization` is forwarded to them.

    `admin_token`: requests with it may change the router's tables; None: any request from this machine.
    `borrower_token`: requests with it may borrow replicas, and nothing else.

    Raises ConfigError for a replica that is named twice.
    """

    for address in replicas:
        proxy.join(address)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch(proxy))
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await proxy.close()

    app = build_application(
        "Étude router", ERRORS, lifespan=lifespan, metrics=proxy.metrics, ready=_ready, figures=_figures
    )
    app.state.proxy = proxy
    app.state.admin_token = admin_token
    app.state.borrower_token = borrower_token
    app.include_router(admin.router)
    for path, forward in (
        ("/v1/{path:path}", _forward_below),
        ("/tokenize", _forward),
        ("/detokenize", _forward),
    ):
        for method in ("GET", "POST", "DELETE"):
            app.add_api_route(path, forward, methods=[method], name="forward", responses=_FORWARDED)
    return app


# ---- forwarded to replicas ----------------------------------------------------------------------


async def _forward(request: Request) -> Response:
    proxy: Proxy = request.app.state.proxy
    if proxy.draining:
        raise NoReplicaError("the router is shutting down", fix="use another router")
    if {".", ".."} & set(request.url.path.split("/")) or {".", ".."} & set(request.scope["path"].split("/")):
        # Such a path could reach other routes of a replica, such as its admin routes.
        raise RouteError("no such path", field="path", received=request.url.path, fix="remove the dots")
    query = f"?{request.url.query}" if request.url.query else ""
    target = request.scope["raw_path"].decode("ascii") + query
    owner = proxy.owner_of(target) if request.method == "GET" else None
    if owner is not None:
        answer = await proxy.fetch_from(owner, target, request.headers.raw)
        return Response(answer.content, answer.status_code, _kept(answer.headers))
    body = await read_body(request, proxy.config.limits.body_bytes)
    asked = await off_loop(len(body), read_hints, request.headers, body, proxy.config.pool)
    opening = proxy.open(asked, request.method, target, request.headers.raw, body)
    opened = await unless_disconnected(request, opening)
    headers = {**_kept(opened.answer.headers), REPLICA_HEADER: opened.replica}
    if opened.rest is None:
        return Response(opened.first, opened.answer.status_code, headers)
    return _Relayed(proxy, opened, headers)


async def _forward_below(request: Request, path: str) -> Response:
    return await _forward(request)


class _Relayed(StreamingResponse):
    """A stream whose answer is discarded even if the client leaves before its first byte was sent."""

    def __init__(self, proxy: Proxy, opened: OpenAnswer, headers: dict[str, str]) -> None:
        super().__init__(proxy.relay(opened), opened.answer.status_code, headers)
        self._proxy = proxy
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._proxy.discard(self._opened)


def _kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _DROPPED}


# ---- about the router ---------------------------------------------------------------------------


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


async def _figures(request: Request) -> str:
    proxy: Proxy = request.app.state.proxy
    gauges: dict[tuple[str, Labels], float] = {}
    for name, replica in proxy.router.replicas.items():
        labels = (("pool", replica.pool), ("replica", name))
        gauges["etude_router_replica_ready", labels] = float(replica.ready)
        gauges["etude_router_replica_ejected", labels] = float(replica.state is ReplicaState.EJECTED)
        gauges["etude_router_replica_running", labels] = replica.running
        gauges["etude_router_replica_outstanding_tokens", labels] = replica.work
        gauges["etude_router_replica_sessions", labels] = len(replica.sessions)
    if proxy.loans is not None:
        gauges["etude_router_lent", ()] = len(proxy.loans.book.loans)
        gauges["etude_router_borrowers", ()] = len(proxy.loans.book.borrowers)
        gauges["etude_router_last_recall_seconds", ()] = proxy.loans.last_recall_s
    gauges["etude_router_spills", ()] = proxy.router.spills
    gauges["etude_router_ejections", ()] = proxy.members.ejections
    return proxy.metrics.text(gauges)


# ---- the process --------------------------------------------------------------------------------


def serve(
    proxy: Proxy,
    admin_token: str | None = None,
    borrower_token: str | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves at the configured address until a signal ends it; reports on stderr when it is ready. Blocks.
    The router checks no API keys: without `replicas_check_keys` it may only listen on loopback. Raises
    ConfigError."""
    config = proxy.config
    check_host(
        config.host,
        config.replicas_check_keys,
        "other hosts can reach this address, and the router checks no keys",
        "let the replicas check keys and say so",
    )
    replicas = [ReplicaAddress(replica.url, replica.pool or None) for replica in config.replicas]
    app = build_app(proxy, replicas, admin_token, borrower_token)
    draining = Draining("answers", config.limits.drain_s, proxy, lambda: proxy.router.num_in_flight > 0)
    note = f"{len(replicas)} replica{'s' * (len(replicas) != 1)}"
    if not replicas:
        note += ": POST /router/replicas adds some"
    listeners, names = open_listeners(config.host, config.port), (config.host, *config.allowed_hosts)
    asyncio.run(
        run_server(
            app, SERVER, draining, listeners, note=note, allowed_hosts=names, certificate=certificate, key=key
        )
    )
