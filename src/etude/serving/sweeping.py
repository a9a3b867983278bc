"""Periodic maintenance of a server, such as ending idle sessions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

_SHORTEST_S = 0.05


@contextlib.asynccontextmanager
async def sweeping(
    sweep: Callable[[], Awaitable[object]], idle_s: float, most_s: float
) -> AsyncIterator[None]:
    """Calls `sweep` periodically until the block ends: twice within `idle_s`, the idle timeout, and at least
    once in `most_s`. An error of `sweep` ends the sweeping, and is raised at the end of the block."""

    async def run() -> None:
        while True:
            await asyncio.sleep(min(most_s, max(idle_s / 2, _SHORTEST_S)))
            await sweep()

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
