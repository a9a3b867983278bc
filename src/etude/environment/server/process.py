"""The server as a process: its tokens, its address, its end.

The first SIGTERM (or SIGINT) drains: turns that run are finished, nothing new is begun, `/ready` says so.
Then, after `drain_s` or at a second signal, every session is closed and the process ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import uvicorn

from etude.environment.server.app import build_app
from etude.environment.server.host import SessionHost
from etude.errors import ConfigError
from etude.sandbox.server.process import DrainingServer, is_loopback

DEFAULT_PORT = 8652
_LOOK_S = 0.2
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
    asyncio.run(EnvironmentProcess(config, host_sessions, drain_s).serve())


class EnvironmentProcess(DrainingServer):
    """uvicorn's server, which finishes the turns that run before it ends."""

    def __init__(self, config: uvicorn.Config, host: SessionHost, drain_s: float) -> None:
        # The base class looks at `draining` only, and that in the method which is replaced here.
        super().__init__(config, cast(Any, host), drain_s)
        self._host = host

    async def _drain(self) -> None:
        self._host.draining = True
        print(
            f"environment server: ending once its turns have, in {self._drain_s:g} s at the latest; "
            "a second signal does not wait",
            file=sys.stderr,
            flush=True,
        )
        end_s = asyncio.get_running_loop().time() + self._drain_s
        while asyncio.get_running_loop().time() < end_s and self._host.num_busy:  # noqa: ASYNC110
            # Turns, gradings and forks end in many places; none of them knows of this.
            await asyncio.sleep(_LOOK_S)
        self.should_exit = True
