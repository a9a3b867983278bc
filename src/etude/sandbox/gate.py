"""What lets nothing new through while a sandbox is copied, and tells for how long that was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Shut at first, until `open`; and for as long as anybody keeps it closed."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._num_closings = 0
        self._since_s = 0.0
        self._before_s = 0.0

    async def wait(self) -> None:
        """Waits until it is open."""
        await self._is_open.wait()

    def open(self) -> None:
        """Opens it, unless it is kept closed: then it opens afterwards."""
        if not self._num_closings:
            self._is_open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keeps it closed in the block."""
        if not self._num_closings:
            self._since_s = time.monotonic()
        self._num_closings += 1
        self._is_open.clear()
        try:
            yield
        finally:
            self._num_closings -= 1
            if not self._num_closings:
                self._before_s += time.monotonic() - self._since_s
            self.open()

    def closed_s(self) -> float:
        """For how many seconds it has been kept closed, all in all."""
        return self._before_s + (time.monotonic() - self._since_s if self._num_closings else 0.0)
