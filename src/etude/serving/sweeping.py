"""What a server does again and again while it runs, such as ending what nobody goes on with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

_SHORTEST_S = 0.05


@contextlib.asynccontextmanager
async def sweeping(
    sweep: Callable[[], Awaitable[object]], idle_s: float, most_s: float
) -> AsyncIterator[None]:
    """Calls `sweep` until the block ends: twice within `idle_s`, the time after which something is idle, and
    at least once in `most_s`. What `sweep` raises ends the sweeping, and is raised at the block's end."""

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
