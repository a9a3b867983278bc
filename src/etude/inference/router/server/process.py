"""The router as a process: listening address and shutdown.

The first SIGTERM (or SIGINT) drains: `/ready` reports it, answers in progress are finished, then the process
ends.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from etude.inference.router.server.app import build_app
from etude.inference.router.server.proxy import Proxy, ReplicaAddress
from etude.serving.listening import check_host, open_listeners
from etude.serving.process import Draining, run_server

SERVER = "router"
"""Its name in messages."""


def serve(
    proxy: Proxy,
    admin_token: str | None = None,
    borrower_token: str | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serves at the configured address until a signal ends it; reports on stderr when it is ready. Blocks.
    The router checks no API keys: without `replicas_check_keys` it may only listen on loopback. Raises
    ConfigError."""
    config = proxy.config
    check_host(
        config.host,
        config.replicas_check_keys,
        "other hosts can reach this address, and the router checks no keys",
        "let the replicas check keys and say so",
    )
    replicas = [ReplicaAddress(replica.url, replica.pool or None) for replica in config.replicas]
    app = build_app(proxy, replicas, admin_token, borrower_token)
    draining = Draining("answers", config.limits.drain_s, proxy, lambda: proxy.router.num_in_flight > 0)
    note = f"{len(replicas)} replica{'s' * (len(replicas) != 1)}"
    if not replicas:
        note += ": POST /router/replicas adds some"
    listeners, names = open_listeners(config.host, config.port), (config.host, *config.allowed_hosts)
    asyncio.run(
        run_server(
            app, SERVER, draining, listeners, note=note, allowed_hosts=names, certificate=certificate, key=key
        )
    )
