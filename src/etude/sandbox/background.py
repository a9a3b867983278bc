"""Work that goes on beside whoever asked for it; nothing that goes wrong in it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`; a cancelled caller waits for its end all the same. For what must not stop halfway."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


class Background:
    """Tasks that somebody waits for in the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._mishaps: list[BaseException] = []

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Does something beside."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def wait(self) -> BaseException | None:
        """Waits until all is done; the first thing that went wrong since the last call."""
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        mishaps, self._mishaps = self._mishaps, []
        return mishaps[0] if mishaps else None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._mishaps.append(error)
