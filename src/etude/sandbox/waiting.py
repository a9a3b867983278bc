"""Those who wait for something scarce: tenants in turns, each tenant's own in the order of arrival.

The request at the head is served as soon as what it wants is there, and none before it, however little
it wants. So nobody starves: each tenant in turn has one request served, and a large one waits until there is
room for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Wanted = TypeVar("Wanted")
Given = TypeVar("Given")


class WaitingLine(Generic[Wanted, Given]):
    """For one event loop. Waits for: `serve`, which is called when something becomes free."""

    def __init__(self, take: Callable[[Wanted], Given | None], give_back: Callable[[Given], None]) -> None:
        """`take`: what is wanted, or None while there is none. `give_back`: what nobody came to fetch."""
        self._take = take
        self._give_back = give_back
        self._tenants: OrderedDict[str, deque[tuple[Wanted, asyncio.Future[Given]]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def by_tenant(self) -> dict[str, int]:
        """How many wait for each tenant, in the order of their turns."""
        return {tenant: len(line) for tenant, line in self._tenants.items()}

    async def wait(self, wanted: Wanted, timeout_s: float | None, tenant: str = "") -> Given:
        """What is wanted, once it is this caller's turn. Raises TimeoutError."""
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
                self._give_back(row[1].result())  # it came in the instant of giving up
            self.serve()
            raise

    def serve(self) -> None:
        """Something has changed: serves from the head on as long as there is enough."""
        while self._tenants:
            wanted, future = next(iter(self._tenants.values()))[0]
            if not future.done():
                given = self._take(wanted)
                if given is None:
                    return
                future.set_result(given)
            self._pop()

    def refuse(self, error: Exception) -> None:
        """The next request gets the error."""
        while self._tenants:
            future = self._pop()
            if not future.done():
                future.set_exception(error)
                return

    def refuse_all(self, error: Exception) -> None:
        """Everyone who waits gets the error."""
        while self._tenants:
            self.refuse(error)

    def _pop(self) -> asyncio.Future[Given]:
        tenant, line = self._tenants.popitem(last=False)
        _, future = line.popleft()
        if line:
            self._tenants[tenant] = line  # behind all others
        return future
