"""The relay over HTTP: lists, files, and the notes that readers leave for the writer."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Annotated, Self

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from etude.config.secrets import AccessError, check_bearer
from etude.errors import EtudeError, StoreError
from etude.weights.folders import MissingError, UnavailableError
from etude.weights.relay import Relay

_START_S = 60.0
_NOTE_BYTES = 1 << 16
"""Largest note that a reader may leave for the writer."""


def build_app(relay: Relay, token: str | None = None) -> FastAPI:
    """An ASGI application over a relay.

    `token`: what readers must present as a bearer; None: whoever reaches it by a loopback name is let in.
    """

    async def check(request: Request) -> None:
        check_bearer(request.headers, token)

    app = FastAPI(title="Étude weight relay", openapi_url=None)
    guarded = [Depends(check)]

    @app.exception_handler(EtudeError)
    async def answer_error(request: Request, error: EtudeError) -> JSONResponse:
        kinds = ((MissingError, 404), (UnavailableError, 503), (AccessError, 401), (_RefusedError, 400))
        status = next((status for kind, status in kinds if isinstance(error, kind)), 502)
        return JSONResponse({"error": str(error)}, status_code=status)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/list/{prefix:path}", dependencies=guarded)
    async def list_names(prefix: str) -> list[str]:
        return await run_in_threadpool(relay.list, _checked(prefix))

    @app.get("/files/{name:path}", dependencies=guarded)
    async def read_file(name: str) -> Response:
        data = await run_in_threadpool(relay.read, _checked(name))
        return Response(data, media_type="application/octet-stream")

    @app.put("/files/{name:path}", dependencies=guarded)
    async def write_file(name: str, data: Annotated[bytes, Depends(_note)]) -> None:
        await run_in_threadpool(relay.write, _checked(name), data)

    @app.get("/metrics", dependencies=guarded)
    async def metrics() -> Response:
        counters = relay.counters
        rows = {
            "fetched_bytes": counters.fetched_bytes,
            "served_bytes": counters.served_bytes,
            "damaged": counters.damaged,
        }
        text = "".join(
            f"# TYPE etude_weight_relay_{name}_total counter\netude_weight_relay_{name}_total {value}\n"
            for name, value in rows.items()
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    return app


class _RefusedError(StoreError):
    """A request that no relay does."""


async def _note(request: Request) -> bytes:
    """The body of a request, if it is no larger than notes are."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _NOTE_BYTES:
            raise _RefusedError("a reader's note is smaller", field="body", received=f"over {_NOTE_BYTES}")
    return data


def _checked(name: str) -> str:
    """Raises StoreError for what would leave the folder."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise _RefusedError("no name in a weight store", field="name", received=name)
    return name


class ServerThread:
    """An application's server in a thread of its own: for one process that is server and more."""

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        """`port` 0: any that is free. `certificate`, `key`: PEM files, for https. Raises StoreError where
        the address cannot be had."""
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise StoreError(
                f"cannot listen there: {error.strerror}",
                field="listen",
                received=f"{host}:{port}",
                fix="name an address of this machine, and a port that is free",
            ) from error
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=2,
                ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="server", daemon=True
        )
        scheme = "https" if certificate is not None else "http"
        self.url = f"{scheme}://{host}:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self._socket.close()
                raise StoreError("the server does not start", field="listen", received=self.url)
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class RelayServer(ServerThread):
    """A relay's server in a thread of its own."""

    def __init__(
        self, relay: Relay, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        """`port` 0: any that is free. `token`: see `build_app`."""
        super().__init__(build_app(relay, token), host, port)
