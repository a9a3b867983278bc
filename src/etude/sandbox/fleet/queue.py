"""Requests that wait for room: in order, not longer than they said, and not more than can be borne."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from etude.sandbox.errors import CapacityError
from etude.sandbox.fleet.hosts import Placement, Request
from etude.sandbox.fleet.scheduler import Scheduler


class PlacementQueue:
    """First come, first served: a request for much room is not starved by many for little."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float], wait_s: float, max_waiting: int
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Request, asyncio.Future[Placement]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def place(self, request: Request) -> Placement:
        """A reservation. Raises CapacityError after the longest wait, or at once if too many wait."""
        pinned = request.only is not None
        if pinned or not self._waiting:
            placement = self._scheduler.place(request, self._clock())
            if placement is not None:
                return placement
        if len(self._waiting) >= self._max_waiting:
            raise self._full(f"{self._max_waiting} requests wait already")
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        row = (request, future)
        self._waiting.append(row)
        delivered = False
        try:
            async with asyncio.timeout(self._wait_s):
                placement = await future
            delivered = True
            return placement
        except TimeoutError as error:
            raise self._full(f"waited {self._wait_s} s") from error
        finally:
            self._leave(row, delivered)

    def pump(self) -> None:
        """Something changed: serves as many as there is room for."""
        while self._waiting:
            request, future = self._waiting[0]
            if not future.done():
                placement = self._scheduler.place(request, self._clock())
                if placement is None:
                    return
                future.set_result(placement)
            self._waiting.popleft()

    def _leave(self, row: tuple[Request, asyncio.Future[Placement]], delivered: bool) -> None:
        """The caller is done waiting; a place that came in the instant of giving up is given back."""
        if row in self._waiting:
            self._waiting.remove(row)
        if delivered:
            return
        future = row[1]
        if future.done() and not future.cancelled():
            self._scheduler.cancel(future.result().ticket)
        self.pump()

    def _full(self, why: str) -> CapacityError:
        return CapacityError(
            f"no host has room for another sandbox: {why}",
            field="fleet",
            received=f"{len(self._waiting)} waiting",
            fix="add hosts, end sandboxes, or allow a longer wait",
        )
