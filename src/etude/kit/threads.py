"""Parallel work on threads, with results in order and bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    num_threads: int,
    pool: ThreadPoolExecutor | None = None,
) -> Iterator[Result]:
    """Yields `work` of each item, in order. At most two items per thread are in progress or wait to be read.

    `pool`: the threads to use, else new ones. After an error none of them works on an item any more, so the
    caller may change what they used.
    """
    if num_threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(num_threads) if pool is None else nullcontext(pool) as threads:
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                if len(pending) == 2 * num_threads:
                    yield pending.popleft().result()
                pending.append(threads.submit(work, item))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                if not future.cancel():
                    future.exception()
