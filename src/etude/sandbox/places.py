"""A bounded number of places, and a fair queue of tenants before it.

Invariants: never more places held than there are; whoever stands at the head of the queue is served as
soon as enough places are free, and nobody before him, however little he wants. So nobody starves: each
tenant in turn has one request served, and a large one waits until its places are free.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.sandbox.errors import CapacityError


@dataclass(eq=False)
class Waiter:
    """Who waits for `num` places together."""

    tenant: str
    num: int
    granted: asyncio.Future[None] = field(repr=False)


class FairQueue:
    """Waiters in turns: the tenants one after the other, each tenant's own in the order of arrival."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[Waiter]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def push(self, waiter: Waiter) -> None:
        """Stands at the end of its tenant's line; a tenant who had none comes after all others."""
        self._tenants.setdefault(waiter.tenant, deque()).append(waiter)

    def head(self) -> Waiter | None:
        """Whose turn it is."""
        return next((line[0] for line in self._tenants.values()), None)

    def pop(self) -> Waiter:
        """Takes the head out; its tenant goes behind all others. Raises KeyError if nobody waits."""
        tenant, line = self._tenants.popitem(last=False)
        waiter = line.popleft()
        if line:
            self._tenants[tenant] = line
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Takes out who no longer waits. Idempotent."""
        line = self._tenants.get(waiter.tenant)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        if not line:
            del self._tenants[waiter.tenant]

    def by_tenant(self) -> dict[str, int]:
        """How many wait for each tenant, in the order of their turns."""
        return {tenant: len(line) for tenant, line in self._tenants.items()}


class Places:
    """`total` places for one event loop. Waits for: places given back. Unblocked by `release`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.queue = FairQueue()

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return self.total - self.held

    async def acquire(self, tenant: str, num: int, timeout_s: float) -> None:
        """Takes `num` places together. Raises CapacityError after `timeout_s`, or at once if there are fewer.

        A caller who is cancelled leaves the queue, and gives back what it was given meanwhile.
        """
        if num > self.total:
            raise CapacityError(
                f"there are {self.total} places in all",
                field="pool.max_live",
                received=num,
                fix=f"ask for {self.total} at most, or raise max_live",
            )
        waiter = Waiter(tenant, num, asyncio.get_running_loop().create_future())
        self.queue.push(waiter)
        self.serve()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.granted
        except BaseException as error:
            granted = waiter.granted
            was_served = granted.done() and not granted.cancelled() and granted.exception() is None
            if was_served and isinstance(error, TimeoutError):
                return
            if was_served:
                self.release(num)
            else:
                self.queue.remove(waiter)
                self.serve()
            if isinstance(error, TimeoutError):
                raise self._too_long(waiter, timeout_s) from error
            raise

    def release(self, num: int = 1) -> None:
        """Gives places back, and serves whoever can be served."""
        assert 0 <= num <= self.held, "more places are given back than are held"
        self.held -= num
        self.serve()

    def serve(self) -> None:
        """Serves from the head of the queue as long as it fits."""
        while (head := self.queue.head()) is not None and (head.granted.done() or head.num <= self.free):
            self.queue.pop()
            if not head.granted.done():
                self.held += head.num
                head.granted.set_result(None)

    def refuse_all(self, make_error: Callable[[], Exception]) -> None:
        """Everyone who waits gets the error."""
        while self.queue.head() is not None:
            waiter = self.queue.pop()
            if not waiter.granted.done():
                waiter.granted.set_exception(make_error())

    def _too_long(self, waiter: Waiter, timeout_s: float) -> CapacityError:
        waiting = ", ".join(f"{tenant}: {num}" for tenant, num in self.queue.by_tenant().items()) or "none"
        return CapacityError(
            f"no place became free in {timeout_s:g} s: {self.held} of {self.total} are held, "
            f"others that wait: {waiting}",
            field="pool.max_live",
            received=waiter.num,
            fix="kill or pause sandboxes, raise max_live, or wait longer (queue_timeout_s)",
        )
