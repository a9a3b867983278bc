"""An application as a process: ready, serving, draining, ended.

    listeners --> application starts --> "NAME: ready at http://HOST:PORT" --> serves --> drains --> ends

The address is taken before anything is started, so that a port that is busy costs one line. The first
SIGTERM (or SIGINT) drains: nothing new begins, what lives may finish within `drain_s`. Then, or at a second
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

_LOOK_S = 0.2
_CLOSE_S = 10.0
_START_S = 60.0
_MOST_CONNECTIONS = 1 << 14


class Drainable(Protocol):
    """The state of a server that can be asked to take nothing new."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Draining:
    """How a server ends: what it waits for, and for how long."""

    held: str
    """What it holds, in words."""
    drain_s: float
    state: Drainable | None
    """What refuses everything new once it is draining."""
    is_busy: Callable[[], bool | Awaitable[bool]]
    """Whether some of `held` are still there."""


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
    """Serves an application until a signal ends it; says on stderr when and where it is ready.

    Takes the listeners over. `note`: what else to say of it then. `allowed_hosts`: names by which it may be
    asked, besides the address of the connection; this machine's too where it listens on all addresses.
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
    """How every server of ours runs: with as many open files as the machine allows, half of them for
    connections, and no connection for ever that sends no request.

    `close_s`: what is being answered at the end may take so long. Raises ConfigError for a certificate that
    cannot be used.
    """
    if key is not None and certificate is None:
        raise ConfigError(
            "a key without a certificate", field="certificate", received=str(key), fix="give --certificate"
        )
    config = uvicorn.Config(
        app,
        http=HeadTimedProtocol,
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
    """Raises the limit on open files to the most that this process may have; that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else _MOST_CONNECTIONS * 2


class HeadTimedProtocol(H11Protocol):
    """uvicorn's connection, which has to send the whole head of a request within `head_s` of its beginning
    and of its last answer; uvicorn itself waits for ever once it has got a first byte."""

    head_s = 20.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._expect_head()

    def on_response_complete(self) -> None:
        """The next request may come."""
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
        if self in self.connections and not is_answering:  # a web socket has left the connections
            self.transport.close()


class _ServerBeside(uvicorn.Server):
    """uvicorn's server beside something else in its process, to which signals are."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves them alone."""
        yield


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    """The address of an application on a free port of the loopback address, in this event loop."""
    server = _ServerBeside(configure(app))
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
    """An application's server in a thread of its own: for one process that is server and more."""

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Path | None = None,
        key: Path | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """`port` 0: any that is free. `allowed_hosts`: see `run_server`; `host` is one.
        `certificate`, `key`: PEM files, for https. Raises ConfigError where the address or the certificate
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
                raise InfrastructureError("the server does not start", field="listen", received=self.url)
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
    """uvicorn's server, which says when it is ready, and waits for what it holds before it ends."""

    def __init__(self, config: uvicorn.Config, name: str, draining: Draining, note: str = "") -> None:
        """`name`: what it is called in what it says; `note`: said behind its address."""
        super().__init__(config)
        self._name = name
        self._note = note
        self._draining = draining
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, listens, and says so."""
        await super().startup(sockets)
        if self.started:
            scheme = "https" if self.config.is_ssl else "http"
            urls = [_url(scheme, listener) for listener in sockets or []]
            say(self._name, f"ready at {', '.join(urls)}{self._note and f'; {self._note}'}")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals drain; they are not raised again afterwards, since an asked-for end is no failure."""
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
            f"ending once its {draining.held} have, in {draining.drain_s:g} s at the latest; "
            "a second signal does not wait",
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draining.drain_s):
                    while await self._is_busy():  # noqa: ASYNC110
                        # What is held ends in many places, none of which knows of this.
                        await asyncio.sleep(_LOOK_S)
        finally:
            self.should_exit = True

    async def _is_busy(self) -> bool:
        """Whether something is held; for what cannot be asked it is taken to be so."""
        try:
            busy = self._draining.is_busy()
            return busy if isinstance(busy, bool) else await busy
        except InfrastructureError:
            return True


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
