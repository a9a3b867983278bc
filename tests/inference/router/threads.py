"""Routers and what they route to, in threads of their own: for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from etude.config.routing import HealthCheckConfig, RouterConfig
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from tests.fakes.replica import running_server

_LIMIT_S = 60.0


@contextlib.contextmanager
def in_thread(opening: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """The address of a server that is open until the end of the block."""
    found: Future[str] = Future()
    ended = threading.Event()

    async def work() -> None:
        try:
            async with opening as url:
                found.set_result(url)
                await asyncio.to_thread(ended.wait)
        except BaseException as error:
            if found.done():
                raise
            found.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        yield found.result(_LIMIT_S)
    finally:
        ended.set()
        thread.join(_LIMIT_S)


@contextlib.asynccontextmanager
async def routing(replicas: Sequence[str], replica_token: str = "", **options: Any) -> AsyncIterator[str]:
    """The address of a router over these, once all of them get requests. `options`: of its configuration."""
    proxy = Proxy(RouterConfig(**{"health": HealthCheckConfig(timeout_s=_LIMIT_S)} | options), replica_token)
    async with running_server(build_app(proxy, [ReplicaAddress(url) for url in replicas])) as url:
        async with asyncio.timeout(_LIMIT_S):
            while not all(one.ready for one in proxy.router.replicas.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield url
