"""Runs an application as a server process: starting, serving, draining, ended.

    listeners --> application starts --> "NAME: ready at http://HOST:PORT" --> serves --> drains --> ends

The address is bound before anything is started, so that a port in use is reported at once. The first SIGTERM
(or SIGINT) drains: no new work is accepted, running work may finish within `drain_s`. Then, or at a second
signal, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, Self

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from etude.errors import ConfigError, InfrastructureError
from etude.serving.listening import accepted_hosts, open_listeners, say

_POLL_S = 0.2
_CLOSE_S = 10.0
_START_S = 60.0
_MOST_CONNECTIONS = 1 << 14


class Drainable(Protocol):
    """The state of a server that can refuse new work."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Draining:
    """How a server shuts down: what it waits for, and for how long."""

    awaited: str
    """What it waits for, as a plural noun for messages, such as `sessions`."""
    drain_s: float
    state: Drainable | None
    """Refuses new work while its `draining` is set."""
    is_busy: Callable[[], bool | Awaitable[bool]]
    """Whether some of what it waits for still runs."""


async def run_server(
    app: FastAPI,
    name: str,
    draining: Draining,
    listeners: Sequence[socket.socket],
    *,
    note: str = "",
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves an application until a signal ends it; prints its address on stderr when it is ready.

    Closes the listeners at the end. `note`: text behind that address. `allowed_hosts`: accepted host names,
    besides the address of the connection, and this machine's name if the server listens on all addresses.
    Raises ConfigError for a certificate that cannot be used.
    """
    try:
        app.state.allowed_hosts = accepted_hosts(listeners, allowed_hosts)
        config = configure(app, certificate, key, int(_CLOSE_S))
        await DrainingServer(config, name, draining, note).serve(list(listeners))
    finally:
        for listener in listeners:
            listener.close()


def configure(
    app: ASGIApp, certificate: Path | None = None, key: Path | None = None, close_s: int = 2
) -> uvicorn.Config:
    """The uvicorn configuration of every server: the most open files that the process may have, half of them
    for connections, and a time limit for request headers.

    `close_s`: how long requests in flight may take at shutdown. Raises ConfigError for a certificate that
    cannot be used.
    """
    if key is not None and certificate is None:
        raise ConfigError(
            "a key without a certificate", field="certificate", received=str(key), fix="give --certificate"
        )
    config = uvicorn.Config(
        app,
        http=HeaderTimeoutProtocol,
        log_level="warning",
        access_log=False,
        limit_concurrency=min(_raise_file_limit() // 2, _MOST_CONNECTIONS),
        timeout_graceful_shutdown=close_s,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        if certificate is None:
            raise
        raise ConfigError(
            f"cannot be used: {error}",
            field="certificate",
            received=str(certificate),
            fix="give the PEM files of a certificate and of its key",
        ) from error
    return config


def _raise_file_limit() -> int:
    """Raises the soft limit on open files to the hard limit, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else _MOST_CONNECTIONS * 2


class HeaderTimeoutProtocol(H11Protocol):
    """uvicorn's connection with a time limit: a client must send all headers of a request within `head_s` of
    connecting or of the last answer. uvicorn itself waits without limit after the first byte."""

    head_s = 20.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._expect_head()

    def on_response_complete(self) -> None:
        """Restarts the time limit for the next request."""
        super().on_response_complete()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.head_s, self._check_head)

    def _check_head(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self in self.connections and not is_answering:  # an upgraded WebSocket is no longer in it
            self.transport.close()


class _EmbeddedServer(uvicorn.Server):
    """uvicorn's server as a part of a process that handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Installs no signal handlers."""
        yield


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """Serves an application in this event loop on a free port of 127.0.0.1; yields its URL."""
    server = _EmbeddedServer(configure(app))
    listeners = open_listeners("127.0.0.1", 0)
    running = asyncio.ensure_future(server.serve(listeners))
    try:
        async with asyncio.timeout(_START_S):
            while not server.started:
                if running.done():
                    raise InfrastructureError("the server did not start", field="listen")
                await asyncio.sleep(0.005)
        yield _url("http", listeners[0])
    finally:
        server.should_exit = True
        await running
        for listener in listeners:
            listener.close()


class ServerThread:
    """An application's server in a thread of its own, for a process that does other work too."""

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Path | None = None,
        key: Path | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """`port` 0: any free port. `allowed_hosts`: see `run_server`; `host` is always accepted.
        `certificate`, `key`: PEM files, for https. Raises ConfigError if the address or the certificate
        cannot be used."""
        self._server = uvicorn.Server(configure(app, certificate, key))
        self._listeners = open_listeners(host, port)
        app.state.allowed_hosts = accepted_hosts(self._listeners, (host, *allowed_hosts))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": self._listeners}, name="server", daemon=True
        )
        scheme = "https" if certificate is not None else "http"
        self.url = f"{scheme}://{host}:{self._listeners[0].getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self._close()
                raise InfrastructureError("the server did not start", field="listen", received=self.url)
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which announces that it is ready, and waits for running work before it ends."""

    def __init__(self, config: uvicorn.Config, name: str, draining: Draining, note: str = "") -> None:
        """`name`: the server's name in printed lines; `note`: printed behind its address."""
        super().__init__(config)
        self._name = name
        self._note = note
        self._draining = draining
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, listens, and prints the addresses."""
        await super().startup(sockets)
        if self.started:
            scheme = "https" if self.config.is_ssl else "http"
            urls = [_url(scheme, listener) for listener in sockets or []]
            say(self._name, f"ready at {', '.join(urls)}{self._note and f'; {self._note}'}")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Drains on signals, and does not raise them again afterwards: a requested end is no failure."""
        self._loop = asyncio.get_running_loop()
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        if self._drain_task is None:
            self._drain_task = asyncio.ensure_future(self._drain())
        else:
            self.should_exit = True

    async def _drain(self) -> None:
        draining = self._draining
        if draining.state is not None:
            draining.state.draining = True
        say(
            self._name,
            f"shutting down when its {draining.awaited} have ended, after at most {draining.drain_s:g} s; "
            "a second signal ends it at once",
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draining.drain_s):
                    while await self._is_busy():  # noqa: ASYNC110
                        # The work ends in many places, none of which knows that the server drains.
                        await asyncio.sleep(_POLL_S)
        finally:
            self.should_exit = True

    async def _is_busy(self) -> bool:
        """Whether work is still running; True if that cannot be found out."""
        try:
            busy = self._draining.is_busy()
            return busy if isinstance(busy, bool) else await busy
        except InfrastructureError:
            return True


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
