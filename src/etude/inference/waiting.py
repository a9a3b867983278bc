"""Waiting for a call that others may end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_others(explain: Callable[[], None]) -> Iterator[None]:
    """For the block in which a task waits for a call. Where not the task is cancelled but the call, `explain`
    may raise why; a task that is cancelled itself, even if at the same moment, hears of that alone."""
    caller = asyncio.current_task()
    assert caller is not None, "something is awaited"
    num_cancelled = caller.cancelling()
    try:
        yield
    except asyncio.CancelledError:
        if caller.cancelling() == num_cancelled:
            explain()
        raise
