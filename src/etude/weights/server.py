"""The relay's HTTP server: lists, files, and the notes that readers write for the writer."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from etude.errors import StoreError
from etude.serving.application import Binary, bearer_required, build_application, read_body
from etude.serving.describing import BYTES, described
from etude.serving.errors import OwnErrors
from etude.serving.metrics import Metrics
from etude.serving.process import ServerThread
from etude.weights.folders import MissingError, UnavailableError
from etude.weights.relay import ReadOnlyError, Relay

_NOTE_BYTES = 1 << 16
"""Largest note that a reader may write."""
_NAME_CHARACTERS = 1024
_PART_BYTES = 255


class _RefusedError(StoreError):
    """A malformed request."""


_ERRORS = OwnErrors({MissingError: 404, UnavailableError: 503, _RefusedError: 400, ReadOnlyError: 403})


def build_app(relay: Relay, token: str | None = None) -> FastAPI:
    """An ASGI application over a relay.

    `token`: bearer token that readers must send; None: access is open.
    """

    async def figures(request: Request) -> str:
        counters = relay.counters
        found = Metrics()
        found.count("etude_weight_relay_fetched_bytes", counters.fetched_bytes)
        found.count("etude_weight_relay_served_bytes", counters.served_bytes)
        found.count("etude_weight_relay_damaged", counters.damaged)
        return found.text()

    guard = bearer_required(token)
    app = build_application("Étude weight relay", _ERRORS, figures=figures, guard=guard)
    routes = APIRouter(dependencies=[guard])

    @routes.get("/list/{prefix:path}")
    async def list_names(prefix: str) -> list[str]:
        return await run_in_threadpool(relay.list, _checked(prefix))

    @routes.get("/files/{name:path}", response_class=Binary)
    async def read_file(name: str) -> Response:
        data = await run_in_threadpool(relay.read, _checked(name))
        return Binary(data)

    @routes.put("/files/{name:path}", openapi_extra=described(body=BYTES))
    async def write_file(name: str, request: Request) -> None:
        data = await read_body(request, _NOTE_BYTES)
        await run_in_threadpool(relay.write, _checked(name), data)

    app.include_router(routes)
    return app


def _checked(name: str) -> str:
    """Returns `name`. Raises StoreError if it is malformed or would leave the folder."""
    parts = name.split("/")
    is_hidden = any(part.startswith(".") or not part for part in parts)
    is_long = len(name) > _NAME_CHARACTERS or any(len(part.encode()) > _PART_BYTES for part in parts)
    if is_hidden or is_long or "\\" in name or not name.isprintable():
        raise _RefusedError("is not a valid name in a weight store", field="name", received=name)
    return name


class RelayServer(ServerThread):
    """A relay's server in its own thread."""

    def __init__(
        self, relay: Relay, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        """`port` 0: any that is free. `token`: see `build_app`."""
        super().__init__(build_app(relay, token), host, port)
