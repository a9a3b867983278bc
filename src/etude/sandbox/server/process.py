"""The server as a process. What a killed one leaves, the backends clear away at the next start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.sandbox.interface import SandboxBackend
from etude.sandbox.server.app import build_app
from etude.sandbox.server.state import Limits, ServerState
from etude.serving.listening import check_token, open_listeners
from etude.serving.process import Draining, run_server

DEFAULT_PORT = 8642


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
    allowed_hosts: Sequence[str] = (),
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

    async def is_busy() -> bool:
        return any((await state.prune()).values())

    draining = Draining("sandboxes", drain_s, state, is_busy)
    listeners = open_listeners(host, port)
    asyncio.run(
        run_server(
            app,
            "sandbox server",
            draining,
            listeners,
            allowed_hosts=(host, *allowed_hosts),
            certificate=certificate,
            key=key,
        )
    )
