"""A fair queue for a scarce resource: round-robin over tenants, first come first served within each.

The request at the head is served as soon as it can be satisfied, and no request overtakes it, however small.
So none starves: each tenant in turn has one request served, and a large one waits until there is room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Wanted = TypeVar("Wanted")
Given = TypeVar("Given")


class WaitingLine(Generic[Wanted, Given]):
    """The queue, for one event loop. Waits for: `serve`, which is called when a resource becomes free."""

    def __init__(self, acquire: Callable[[Wanted], Given | None], release: Callable[[Given], None]) -> None:
        """`acquire`: allocates what a request wants, or returns None if it is not available. `release`: frees
        an allocation whose caller was cancelled."""
        self._acquire = acquire
        self._release = release
        self._tenants: OrderedDict[str, deque[tuple[Wanted, asyncio.Future[Given]]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def by_tenant(self) -> dict[str, int]:
        """Number of waiting requests by tenant, in the order of their turns."""
        return {tenant: len(line) for tenant, line in self._tenants.items()}

    async def wait(self, wanted: Wanted, timeout_s: float | None, tenant: str = "") -> Given:
        """Waits for the caller's turn; returns what was acquired. Raises TimeoutError."""
        row = (wanted, asyncio.get_running_loop().create_future())
        self._tenants.setdefault(tenant, deque()).append(row)
        self.serve()
        try:
            async with asyncio.timeout(timeout_s):
                return await row[1]
        except BaseException:
            line = self._tenants.get(tenant)
            if line is not None and row in line:
                line.remove(row)
                if not line:
                    del self._tenants[tenant]
            elif row[1].done() and not row[1].cancelled() and row[1].exception() is None:
                self._release(row[1].result())  # it was acquired just as the caller gave up
            self.serve()
            raise

    def serve(self) -> None:
        """Serves requests from the head while they can be satisfied; called after every change."""
        while self._tenants:
            wanted, future = next(iter(self._tenants.values()))[0]
            if not future.done():
                given = self._acquire(wanted)
                if given is None:
                    return
                future.set_result(given)
            self._pop()

    def refuse(self, error: Exception) -> None:
        """Fails the next request with the error."""
        while self._tenants:
            future = self._pop()
            if not future.done():
                future.set_exception(error)
                return

    def refuse_all(self, error: Exception) -> None:
        """Fails all waiting requests with the error."""
        while self._tenants:
            self.refuse(error)

    def _pop(self) -> asyncio.Future[Given]:
        tenant, line = self._tenants.popitem(last=False)
        _, future = line.popleft()
        if line:
            self._tenants[tenant] = line  # behind all others
        return future
