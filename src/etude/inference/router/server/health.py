"""Probes replicas, lets go of drained ones, lends them to other pools and to runs: the proxy's only
background task."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from etude.errors import EtudeError
from etude.inference.router.server.proxy import Proxy
from etude.kit.tasks import end_tasks
from etude.serving.client import Answer, NoAnswerError, NobodyListensError, read_json

_log = logging.getLogger("etude.inference.router")
_TICK_S = 0.05
_EXPIRE_S = 1.0
_AGAIN_S = 1.0
"""After a defect of ours."""


async def watch(proxy: Proxy) -> None:
    """Runs until it is cancelled."""
    probing: dict[str, asyncio.Task[None]] = {}
    expired_s = 0.0
    try:
        while True:
            now_s = time.monotonic()
            probing = {name: task for name, task in probing.items() if not task.done()}
            try:
                for name in proxy.members.due(now_s):
                    if name not in probing:
                        probing[name] = asyncio.create_task(probe(proxy, name))
                for name in proxy.members.sweep():
                    proxy.addresses.pop(name, None)
                loads = proxy.loans.books.loads() if proxy.loans is not None else None
                every = proxy.router.replicas.values()
                for move in proxy.lender.moves(every, now_s, proxy.day(), loads):
                    proxy.router.lend(move.replica, move.pool)
                    proxy.metrics.count("etude_router_moves", pool=move.pool)
                if proxy.loans is not None:
                    proxy.loans.tick(now_s)
                if now_s - expired_s >= _EXPIRE_S:
                    proxy.router.expire(now_s)
                    expired_s = now_s
            except Exception as error:  # or nobody would see any more which replicas are gone
                _log.error("the router's tables could not be brought up to date", exc_info=error)
                await asyncio.sleep(_AGAIN_S)
            await asyncio.sleep(_TICK_S)
    finally:
        await end_tasks(*probing.values())


async def probe(proxy: Proxy, name: str) -> None:
    """Asks one replica whether it is ready, and notes the answer."""
    address = proxy.addresses[name]
    try:
        async with asyncio.timeout(proxy.members.config.timeout_s):
            answer = await proxy.http.request("GET", address.url.rstrip("/") + "/ready")
    except (TimeoutError, EtudeError) as error:
        cause = error.message if isinstance(error, EtudeError) else "nothing came in time"
        fatal = isinstance(error, NobodyListensError)
        proxy.members.failed(name, time.monotonic(), cause, fatal=fatal)
        return
    said = _document(answer) if answer.status_code == 200 else {}
    replica, pool = proxy.router.replicas.get(name), said.get("pool")
    # Only the first time: one that comes home from a loan is in the pool that the router has put it into.
    is_new = replica is not None and replica.version is None
    if is_new and address.pool is None and pool:
        proxy.router.move(name, str(pool))
    version = said.get("version")
    proxy.members.answered(name, time.monotonic(), version if isinstance(version, str) and version else None)


def _document(answer: Answer) -> dict[str, Any]:
    try:
        found = read_json(answer)
    except NoAnswerError:
        return {}
    return found if isinstance(found, dict) else {}
