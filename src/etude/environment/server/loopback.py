"""A server in this process, on a free port of the loopback address: for probes and tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import uvicorn

from etude.environment.server.app import build_app
from etude.environment.server.host import SessionHost
from etude.errors import InfrastructureError

_START_S = 60.0


@asynccontextmanager
async def on_loopback(host: SessionHost, tokens: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """The address of the running server; stopped, and its host closed, at the end."""
    config = uvicorn.Config(
        build_app(host, tokens), host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve())
    try:
        async with asyncio.timeout(_START_S):
            while not server.started:
                if running.done():
                    raise InfrastructureError("the server did not start", field="environment.server")
                await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
