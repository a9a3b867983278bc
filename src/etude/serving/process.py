"""An application as a process: ready, serving, draining, ended.

    listeners --> application starts --> "NAME: ready at http://HOST:PORT" --> serves --> drains --> ends

The address is taken before anything is started, so that a port that is busy costs one line. The first
SIGTERM (or SIGINT) drains: nothing new begins, what lives may finish within `drain_s`. Then, or at a second
signal, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from etude.errors import ConfigError, InfrastructureError
from etude.serving.listening import say

_LOOK_S = 0.2
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Draining:
    """How a server ends: what it waits for, and for how long."""

    held: str
    """What it holds, in words."""
    drain_s: float
    begin: Callable[[], None]
    """Refuses what is new from then on."""
    is_busy: Callable[[], Awaitable[bool]]
    """Whether some of `held` are still there."""


async def run_server(
    app: ASGIApp,
    name: str,
    draining: Draining,
    listeners: Sequence[socket.socket],
    *,
    note: str = "",
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves an application until a signal ends it; says on stderr when and where it is ready.

    Takes the listeners over. `note`: what else to say of it then. Raises ConfigError for a certificate that
    cannot be used.
    """
    try:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(_CLOSE_S),
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        _load(config, certificate, key)
        await DrainingServer(config, name, draining, note).serve(list(listeners))
    finally:
        for listener in listeners:
            listener.close()


def _load(config: uvicorn.Config, certificate: Path | None, key: Path | None) -> None:
    if key is not None and certificate is None:
        raise ConfigError(
            "a key without a certificate", field="certificate", received=str(key), fix="give --certificate"
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
        draining.begin()
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
            return await self._draining.is_busy()
        except InfrastructureError:
            return True


def _url(scheme: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
