"""Mutual exclusion for the engine: the event loop or one worker thread may use it.

    loop ──work──> its turn ──> a thread has the engine ──> free again ──> deferred actions
             ^                                                │
             └───────── the next caller, first come ──────────┘

An engine is not thread-safe. The loop may use it while `is_free`; callers that cannot wait for that defer
their actions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from etude.kit.tasks import finish_despite_cancel

Result = TypeVar("Result")


class EngineTurns:
    """A FIFO lock on one engine, with deferred actions. To be used from the event loop only."""

    def __init__(self, *, own_thread: bool) -> None:
        """`own_thread`: whether work runs in a thread of its own, else in the loop's executor."""
        self._thread = ThreadPoolExecutor(1, "etude-engine") if own_thread else None
        self._turn = asyncio.Lock()
        self._free = asyncio.Event()
        self._free.set()
        self._deferred: list[Callable[[], None]] = []

    @property
    def is_free(self) -> bool:
        """Whether no thread has the engine. Stays true until the caller awaits something."""
        return self._free.is_set()

    async def wait_until_free(self) -> None:
        """Returns when `is_free`."""
        while not self._free.is_set():
            await self._free.wait()

    def when_free(self, action: Callable[[], None]) -> None:
        """Runs `action` now, or, while a thread has the engine, at the next `run_deferred`."""
        if self.is_free:
            action()
        else:
            self._deferred.append(action)

    def run_deferred(self) -> None:
        """Runs the deferred actions, unless a thread has the engine again. To be called by the owner of a
        turn in a thread, once it has delivered the results."""
        if not self.is_free:
            return
        actions, self._deferred = self._deferred, []
        for action in actions:
            action()

    async def run_in_loop(self, work: Callable[[], Result]) -> Result:
        """Waits for its turn, runs `work` in the loop and returns its result."""
        async with self._turn:
            return work()

    async def run_in_thread(self, work: Callable[[], Result]) -> Result:
        """As `run_in_loop`, in a thread. If cancelled, waits for the end of `work`."""
        async with self._turn:
            self._free.clear()
            try:
                return await finish_despite_cancel(
                    asyncio.get_running_loop().run_in_executor(self._thread, work)
                )
            finally:
                self._free.set()

    async def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)
