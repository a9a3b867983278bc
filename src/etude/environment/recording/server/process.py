"""The server as a process: its tokens, its address, its end.

The first SIGTERM (or SIGINT) drains: no new sessions, `/health` says so, what lives may finish within
`drain_s`. Then, or at a second signal, the process ends. A killed server has stored every session whose
finish it has acknowledged; live sessions are lost, and their clients see it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import sys
from pathlib import Path

import uvicorn

from etude.environment.recording.server.app import build_app
from etude.environment.recording.sessions import Recordings
from etude.errors import ConfigError
from etude.sandbox.server.process import DrainingServer

DEFAULT_PORT = 8650
_CLOSE_S = 10


def read_tokens(path: Path) -> dict[str, str]:
    """Tenants by token, from lines of `name token`; without a file one for `local` is made (mode 0600).

    Raises ConfigError for a file that others may read, or that holds no token.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _existing_tokens(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write the tokens: {error.strerror}",
            field="token_file",
            received=str(path),
            fix="name another",
        ) from error
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"local {token}\n")
    print(f"recording server: new token {token} (kept in {path})", file=sys.stderr)
    return {token: "local"}


def _existing_tokens(path: Path) -> dict[str, str]:
    if path.stat().st_mode & 0o077:
        raise ConfigError(
            "others may read the tokens", field="token_file", received=str(path), fix=f"chmod 600 {path}"
        )
    rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    tokens = {row[1]: row[0] for row in rows if len(row) == 2}
    if not tokens or len(tokens) != len(rows):
        raise ConfigError(
            "must hold lines of a tenant's name and its token",
            field="token_file",
            received=str(path),
            fix="remove it: a new one is made",
        )
    return tokens


def check_address(host: str, certificate: Path | None) -> None:
    """Raises ConfigError for an address that others reach, without TLS: keys would cross in the clear."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback and certificate is None:
        raise ConfigError(
            "keys would cross the network in the clear",
            field="host",
            received=host,
            fix="give --certificate and --key, or bind to 127.0.0.1",
        )


async def serve(
    recordings: Recordings,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    drain_s: float = 60.0,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves until a signal ends it. Raises ConfigError."""
    check_address(host, certificate)
    config = uvicorn.Config(
        build_app(recordings),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_CLOSE_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )

    def begin() -> None:
        recordings.draining = True

    async def is_busy() -> bool:
        return len(recordings) > 0

    await DrainingServer(config, "recording server", "sessions", drain_s, begin, is_busy).serve()
