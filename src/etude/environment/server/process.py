"""The server as a process: its tokens, its address, its end.

The first SIGTERM (or SIGINT) drains: turns that run are finished, nothing new is begun, `/ready` says so.
Then, after `drain_s` or at a second signal, every session is closed and the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import uvicorn

from etude.environment.server.app import build_app
from etude.environment.server.host import SessionHost
from etude.errors import ConfigError
from etude.sandbox.server.process import DrainingServer, is_loopback

DEFAULT_PORT = 8652
_CLOSE_S = 10.0


def read_tenants(path: Path) -> dict[str, str]:
    """Token -> tenant, from lines `TENANT TOKEN`; `#` begins a comment.

    Raises ConfigError for a file that others may read, a line of another form, or a token that two have.
    """
    try:
        text = path.read_text()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", field="tenants", received=str(path), fix="name another"
        ) from error
    if mode & 0o077:
        raise ConfigError(
            "others may read the tokens", field="tenants", received=str(path), fix=f"chmod 600 {path}"
        )
    tokens: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[1] in tokens:
            raise ConfigError(
                "must be TENANT TOKEN, each token once", field=f"tenants: line {number}", fix="mend the line"
            )
        tokens[words[1]] = words[0]
    if not tokens:
        raise ConfigError("holds no token", field="tenants", received=str(path), fix="add TENANT TOKEN")
    return tokens


def serve(
    host_sessions: SessionHost,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    tokens: Mapping[str, str] | None = None,
    drain_s: float = 60.0,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves until a signal ends it. Blocks. Without `tokens` loopback addresses only. Raises ConfigError."""
    if not tokens and not is_loopback(host):
        raise ConfigError(
            "other hosts can reach this address, and there is no token",
            field="host",
            received=host,
            fix="give tokens, or bind to 127.0.0.1",
        )
    config = uvicorn.Config(
        build_app(host_sessions, tokens),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(_CLOSE_S),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )

    def begin() -> None:
        host_sessions.draining = True

    async def is_busy() -> bool:
        return bool(host_sessions.num_busy)

    asyncio.run(DrainingServer(config, "environment server", "turns", drain_s, begin, is_busy).serve())
