"""Every server of ours as a process: its tokens, its address, its end.

    listeners --> application starts --> "NAME: ready at http://HOST:PORT" --> serves --> drains --> ends

The address is taken before anything is started, so that a port that is busy costs one line. The first
SIGTERM (or SIGINT) drains: nothing new begins, what lives may finish within `drain_s`. Then, or at a second
signal, everything is killed and the process ends. A killed server leaves nothing that the backends do not
clear away at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from etude.errors import ConfigError, InfrastructureError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.server.app import build_app
from etude.sandbox.server.state import Limits, ServerState

DEFAULT_PORT = 8642
_LOOK_S = 0.2
_CLOSE_S = 10.0
_TOKEN_BYTES = 32


# Tokens


def read_token(path: Path, server: str = "sandbox server") -> str:
    """The token in a file; a new one is written (mode 0600) if there is no file, and where is told on stderr.

    The token itself is not printed: logs are read by others. `server`: who says so. Raises ConfigError for
    a file that others may read, or that holds no token.
    """
    made = _make_token(path, "", server)
    if made is not None:
        return made
    token = _private_text(path, "token_file").strip()
    if not token or len(token.split()) > 1:
        raise ConfigError(
            "the file holds no token" if not token else "holds more than a token",
            field="token_file",
            received=str(path),
            fix="remove it: a new one is made",
        )
    return token


def read_tenants(path: Path, field: str = "tenants") -> dict[str, str]:
    """Token -> tenant, from lines `TENANT TOKEN`; `#` begins a comment.

    Raises ConfigError for a file that others may read, a line of another form, or a token that two have.
    """
    tokens: dict[str, str] = {}
    for number, line in enumerate(_private_text(path, field).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[1] in tokens:
            raise ConfigError(
                "must be TENANT TOKEN, each token once",
                field=f"{field}: line {number}",
                received=str(path),
                fix="correct the line",
            )
        tokens[words[1]] = words[0]
    if not tokens:
        raise ConfigError("holds no token", field=field, received=str(path), fix="add TENANT TOKEN")
    return tokens


def read_or_make_tenants(path: Path, server: str, tenant: str = "local") -> dict[str, str]:
    """See `read_tenants`; without a file one is made (mode 0600) with a token for `tenant`."""
    made = _make_token(path, f"{tenant} ", server)
    return {made: tenant} if made is not None else read_tenants(path, "token_file")


def _make_token(path: Path, before: str, server: str) -> str | None:
    """Writes a new token into a new file, behind `before`; None if there is a file. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(
            f"cannot write the token: {error.strerror}",
            field="token_file",
            received=str(path),
            fix="name another",
        ) from error
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{before}{token}\n")
    _say(server, f"a new token is in {path}")
    return token


def _private_text(path: Path, field: str) -> str:
    """A file that only its owner may read. Raises ConfigError."""
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigError(
            f"cannot be read: {reason}", field=field, received=str(path), fix="name another"
        ) from error
    if mode & 0o077:
        raise ConfigError(
            "others may read the token", field=field, received=str(path), fix=f"chmod 600 {path}"
        )
    return text


# Addresses


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(host: str, guarded: bool, message: str, fix: str) -> None:
    """Raises ConfigError for an address that others reach, unless the server is `guarded` against them."""
    if not guarded and not is_loopback(host):
        raise ConfigError(message, field="host", received=host, fix=f"{fix}, or bind to 127.0.0.1")


def check_token(host: str, has_token: bool) -> None:
    """Raises ConfigError for an address that others reach, where no token is asked for."""
    check_host(host, has_token, "other hosts can reach this address, and there is no token", "give a token")


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to an address, not listening yet; `port` 0: any that is free.

    Raises ConfigError that names the port if it is taken or may not be used, or the host if it is none of
    this machine's.
    """
    try:
        # By the protocol's number asyncio knows to send at once.
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise _not_bound(host, port, error) from error
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    for family, kind, number, _, address in dict.fromkeys(found):
        chosen = port or (listeners[0].getsockname()[1] if listeners else 0)
        try:
            listeners.append(_bound(family, kind, number, (address[0], chosen, *address[2:])))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                absent = error  # such as ::1 of `localhost`, where there is no IPv6
                continue
            for listener in listeners:
                listener.close()
            raise _not_bound(host, port, error) from error
    if not listeners:
        assert absent is not None, "getaddrinfo gives one address at least"
        raise _not_bound(host, port, absent) from absent
    return listeners


def _bound(family: int, kind: int, number: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _not_bound(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            "something else listens on this port",
            field="port",
            received=port,
            fix=f"end what uses port {port}, or name another with --port",
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            "may not be used without privileges", field="port", received=port, fix="name one from 1024 on"
        )
    return ConfigError(
        f"is no address of this machine: {error.strerror or error}",
        field="host",
        received=host,
        fix="127.0.0.1, or an address that `ip address` lists",
    )


# Serving


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
    """Serves sandboxes until a signal ends it. Blocks.

    `token` None is for loopback addresses alone. `certificate` and `key`: PEM files; without them tokens
    cross the network in the clear. Raises ConfigError.
    """
    check_token(host, token is not None)
    app = build_app(backends, token, limits, peers, spool)
    state: ServerState = app.state.sandboxes

    def begin() -> None:
        state.draining = True

    async def is_busy() -> bool:
        return any((await state.prune()).values())

    draining = Draining("sandboxes", drain_s, begin, is_busy)
    listeners = open_listeners(host, port)
    asyncio.run(run_server(app, "sandbox server", draining, listeners, certificate=certificate, key=key))


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
            _say(self._name, f"ready at {', '.join(urls)}{self._note and f'; {self._note}'}")

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
        _say(
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


def _say(name: str, words: str) -> None:
    """Not by way of a log: whoever starts a server waits for this, if they are still there."""
    with contextlib.suppress(OSError):
        print(f"{name}: {words}", file=sys.stderr, flush=True)
