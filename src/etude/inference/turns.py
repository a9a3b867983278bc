"""Who has the engine: the loop, or one thread at a time.

    loop ──work──> its turn ──> a thread has the engine ──> free again ──> what was put off
             ^                                                │
             └───────── the next in the order of asking ──────┘

An engine is not safe for two threads. The loop may touch it while `is_free`; who cannot wait for that puts
off what it wants to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from etude.kit.tasks import to_the_end

Result = TypeVar("Result")


class EngineTurns:
    """Turns at one engine, in the order of asking. All methods are the loop's."""

    def __init__(self, *, own_thread: bool, before: Callable[[], None]) -> None:
        """`own_thread`: whether work has one thread for itself, else any of the loop's. `before` is called
        right before a thread gets the engine."""
        self._thread = ThreadPoolExecutor(1, "etude-engine") if own_thread else None
        self._before = before
        self._turn = asyncio.Lock()
        self._free = asyncio.Event()
        self._free.set()
        self._put_off: list[Callable[[], None]] = []

    @property
    def is_free(self) -> bool:
        """Whether no thread has the engine: so it stays until the caller waits for something."""
        return self._free.is_set()

    async def wait_until_free(self) -> None:
        """Returns when `is_free`."""
        while not self._free.is_set():
            await self._free.wait()

    def when_free(self, action: Callable[[], None]) -> None:
        """Does it now, or where a thread has the engine, when `catch_up` is called next."""
        if self.is_free:
            action()
        else:
            self._put_off.append(action)

    def catch_up(self) -> None:
        """Does what was put off, unless a thread has the engine again. The owner of a turn in a thread calls
        this, once what came of it is handed over."""
        if not self.is_free:
            return
        actions, self._put_off = self._put_off, []
        for action in actions:
            action()

    async def in_loop(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, in its turn, here."""
        async with self._turn:
            return work()

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, in its turn, in a thread. Cancelled, it waits for the end."""
        async with self._turn:
            self._before()
            self._free.clear()
            try:
                return await to_the_end(asyncio.get_running_loop().run_in_executor(self._thread, work))
            finally:
                self._free.set()

    async def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)
