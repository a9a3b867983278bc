"""The router as a process: its address, its end.

The first SIGTERM (or SIGINT) drains: `/ready` says so, answers under way are finished, then the process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from etude.inference.router.server.app import build_app
from etude.inference.router.server.proxy import Proxy, ReplicaAddress
from etude.serving.listening import check_host, open_listeners
from etude.serving.process import Draining, run_server

DEFAULT_PORT = 8670
SERVER = "router"
"""What it calls itself in what it says."""


def serve(
    proxy: Proxy,
    replicas: Sequence[ReplicaAddress],
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    admin_token: str | None = None,
    borrower_token: str | None = None,
    replicas_check_keys: bool = False,
    drain_s: float = 60.0,
    allowed_hosts: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves until a signal ends it; says on stderr when and where it is ready. Blocks.

    `port` 0: one that is free. The router checks no keys. `replicas_check_keys`: the word of who starts it
    that its replicas do; without it only this machine may reach the router. Raises ConfigError.
    """
    check_host(
        host,
        replicas_check_keys,
        "other hosts can reach this address, and the router checks no keys",
        "let the replicas check keys and say so",
    )
    app = build_app(proxy, replicas, admin_token, borrower_token)

    draining = Draining("answers", drain_s, proxy, lambda: proxy.router.num_in_flight > 0)
    note = f"{len(replicas)} replica{'s' * (len(replicas) != 1)}"
    if not replicas:
        note += ": POST /router/replicas adds some"
    listeners = open_listeners(host, port)
    asyncio.run(
        run_server(
            app,
            SERVER,
            draining,
            listeners,
            note=note,
            allowed_hosts=(host, *allowed_hosts),
            certificate=certificate,
            key=key,
        )
    )
