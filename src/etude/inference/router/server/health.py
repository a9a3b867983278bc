"""The proxy's background task: probes replicas, removes drained ones, lends them to pools and runs."""

from __future__ import annotations

import asyncio
import logging
import time

from etude.errors import EtudeError
from etude.inference.router.server.events import object_in
from etude.inference.router.server.proxy import Proxy
from etude.kit.tasks import end_tasks
from etude.serving.client import NobodyListensError

_log = logging.getLogger("etude.inference.router")
_TICK_S = 0.05
_EXPIRE_S = 1.0
_AGAIN_S = 1.0
"""Pause after an unexpected exception."""


async def watch(proxy: Proxy) -> None:
    """Runs the background task until it is cancelled."""
    probing: dict[str, asyncio.Task[None]] = {}
    expired_s = 0.0
    try:
        while True:
            now_s = time.monotonic()
            probing = {name: task for name, task in probing.items() if not task.done()}
            try:
                for name in proxy.members.due_probes(now_s):
                    if name not in probing:
                        probing[name] = asyncio.create_task(probe(proxy, name))
                for name in proxy.members.remove_drained():
                    proxy.addresses.pop(name, None)
                loads = proxy.loans.book.load_by_pool() if proxy.loans is not None else None
                every = proxy.router.replicas.values()
                for move in proxy.lender.moves(every, now_s, proxy.day(), loads):
                    proxy.router.lend(move.replica, move.pool)
                    proxy.metrics.count("etude_router_moves", pool=move.pool)
                if proxy.loans is not None:
                    proxy.loans.tick(now_s)
                if now_s - expired_s >= _EXPIRE_S:
                    proxy.router.expire(now_s)
                    expired_s = now_s
            except Exception as error:  # the task must survive, or replicas would no longer be probed
                _log.error("the router's tables could not be brought up to date", exc_info=error)
                await asyncio.sleep(_AGAIN_S)
            await asyncio.sleep(_TICK_S)
    finally:
        await end_tasks(*probing.values())


async def probe(proxy: Proxy, name: str) -> None:
    """Asks one replica whether it is ready, and records the outcome."""
    address = proxy.addresses[name]
    try:
        async with asyncio.timeout(proxy.members.config.timeout_s):
            answer = await proxy.http.request("GET", address.url.rstrip("/") + "/ready")
    except (TimeoutError, EtudeError) as error:
        cause = error.message if isinstance(error, EtudeError) else "no answer in time"
        fatal = isinstance(error, NobodyListensError)
        proxy.members.record_failure(name, time.monotonic(), cause, fatal=fatal)
        return
    document = object_in(answer.content) if answer.status_code == 200 else {}
    replica, pool = proxy.router.replicas.get(name), document.get("pool")
    # Only the first time: after a loan the pool that the router has assigned stays.
    is_new = replica is not None and replica.version is None
    if is_new and address.pool is None and pool:
        proxy.router.move(name, str(pool))
    version = document.get("version") or None
    proxy.members.record_probe(name, time.monotonic(), version if isinstance(version, str) else None)
