"""The server as a process: its token, its address, its end.

The first SIGTERM (or SIGINT) drains: no new sandboxes, `/health` says so, what lives may finish within
`drain_s`. Then, or at a second signal, everything is killed and the process ends. A killed server leaves
nothing that the backends do not clear away at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from types import FrameType

import uvicorn

from etude.errors import ConfigError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.server.app import build_app
from etude.sandbox.server.state import Limits, ServerState

DEFAULT_PORT = 8642
_LOOK_S = 0.2
_CLOSE_S = 10.0
_TOKEN_BYTES = 32


def read_token(path: Path) -> str:
    """The token in a file; a new one is written (mode 0600) and told on stderr if there is no file.

    Raises ConfigError for a file that others may read, or that holds no token.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _existing_token(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write the token: {error.strerror}",
            field="token_file",
            received=str(path),
            fix="name another",
        ) from error
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    print(f"sandbox server: new token {token} (kept in {path})", file=sys.stderr)
    return token


def _existing_token(path: Path) -> str:
    if path.stat().st_mode & 0o077:
        raise ConfigError(
            "others may read the token", field="token_file", received=str(path), fix=f"chmod 600 {path}"
        )
    token = path.read_text().strip()
    if not token:
        raise ConfigError(
            "the file holds no token",
            field="token_file",
            received=str(path),
            fix="remove it: a new one is made",
        )
    return token


def serve(
    backends: Mapping[str, SandboxBackend],
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    token: str | None,
    limits: Limits | None = None,
    peers: tuple[str, ...] = (),
    spool: Path | None = None,
    drain_s: float = 60.0,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves until a signal ends it. Blocks.

    `token` None is for loopback addresses alone. `certificate` and `key`: PEM files; without them tokens
    cross the network in the clear. Raises ConfigError.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            "other hosts can reach this address, and there is no token",
            field="host",
            received=host,
            fix="give a token, or bind to 127.0.0.1",
        )
    app = build_app(backends, token, limits, peers, spool)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(_CLOSE_S),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    state: ServerState = app.state.sandboxes

    def begin() -> None:
        state.draining = True

    async def is_busy() -> bool:
        return any((await state.prune()).values())

    asyncio.run(DrainingServer(config, "sandbox server", "sandboxes", drain_s, begin, is_busy).serve())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which waits for what it holds before it ends. Of every server of ours."""

    def __init__(
        self,
        config: uvicorn.Config,
        name: str,
        held: str,
        drain_s: float,
        begin: Callable[[], None],
        is_busy: Callable[[], Awaitable[bool]],
    ) -> None:
        """`begin` refuses what is new from then on; `is_busy` says whether some of `held` are still there."""
        super().__init__(config)
        self._name = name
        self._held = held
        self._drain_s = drain_s
        self._begin = begin
        self._is_busy = is_busy
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

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
        self._begin()
        print(
            f"{self._name}: ending once its {self._held} have, in {self._drain_s:g} s at the latest; "
            "a second signal does not wait",
            file=sys.stderr,
            flush=True,
        )
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        while loop.time() < end_s and await self._is_busy():  # noqa: ASYNC110
            # What is held ends in many places, none of which knows of this.
            await asyncio.sleep(_LOOK_S)
        self.should_exit = True
