"""An asyncio event loop in virtual time: sleeps end at once, in the right order.

Use it only if nothing runs outside of the loop: virtual time does not wait for threads or processes.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` in virtual time from 0 and returns its result. `loop.time()` is in virtual seconds."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of `run_virtual`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Advances virtual time."""
        # Slightly more: at large times asyncio's clock resolution is below the floating-point spacing.
        self._now_s = math.nextafter(self._now_s + seconds, math.inf)


class _JumpingSelector(selectors.DefaultSelector):
    """Advances virtual time instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See selectors.BaseSelector.select."""
        if timeout is None:  # nothing is scheduled: only another thread can wake the loop
            return super().select(None)
        events = super().select(0)
        if not events and timeout > 0:
            self._loop.jump(timeout)
        return events
