"""An asyncio event loop whose clock jumps: whoever sleeps is woken at once, in the right order.

Only where nothing runs outside of the loop: while a thread or a process works, virtual time runs ahead of it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns, run in virtual time that begins at 0. `loop.time()` tells it, in seconds."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of `run_virtual`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Lets so much time pass."""
        # A hair further: far from 0, asyncio's clock resolution would vanish beside the time itself.
        self._now_s = math.nextafter(self._now_s + seconds, math.inf)


class _JumpingSelector(selectors.DefaultSelector):
    """Lets time pass where it would wait for it."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See selectors.BaseSelector.select."""
        if timeout is None:  # nothing is scheduled: only another thread can go on
            return super().select(None)
        events = super().select(0)
        if not events and timeout > 0:
            self._loop.jump(timeout)
        return events
