"""Background tasks of an event loop, whose errors are never lost, and helpers for cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
AnyFuture = TypeVar("AnyFuture", bound=asyncio.Future[Any])
Parameters = ParamSpec("Parameters")

OnError = Callable[[BaseException], object]
LARGE = 1 << 16
"""Inputs of at least this many bytes or characters are processed in a thread (`off_loop`)."""
_SHORTEST_SWEEP_S = 0.05


async def off_loop(
    size: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Calls a function: in a thread if its input of `size` bytes or characters would stall the event loop,
    else inline."""
    if size < LARGE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class Tasks:
    """The set of running tasks of one owner; a task is removed when it ends. For one event loop.

    Its length is the number of running tasks.
    """

    def __init__(self, on_error: OnError | None = None) -> None:
        """`on_error`: called with what a task raises. Without it an error goes to the code that awaits the
        task, and asyncio logs it if no code does."""
        self._tasks: set[asyncio.Future[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Future[Any]]:
        return iter(list(self._tasks))

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Begins a task."""
        return self.add(asyncio.ensure_future(work))

    def add(self, task: AnyFuture) -> AnyFuture:
        """Adds a task that other code has started."""
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def cancel(self) -> None:
        """Requests the cancellation of all tasks; they end when the loop next runs them."""
        for task in self:
            task.cancel()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the tasks running now have ended, at most `timeout_s`. Does not raise their errors."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)

    async def close(self) -> None:
        """Cancels all tasks and waits until they have ended, including tasks that are started meanwhile."""
        while self._tasks:
            self.cancel()
            await self.wait()

    def _on_done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if self._on_error is not None:
            _report_error(task, self._on_error)


class Changes:
    """Wakes all waiters whenever the observed state may have changed. For one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiters: the state may have changed."""
        change, self._next = self._next, asyncio.Event()
        change.set()

    async def wait(self) -> None:
        """Waits for the next change."""
        await self._next.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until the predicate `holds` is true; returns at once if it is already."""
        while not holds():
            await self.wait()


def start_watched(
    work: Coroutine[Any, Any, Result], on_error: OnError = lambda error: None
) -> asyncio.Task[Result]:
    """Starts a task that several callers may await through `asyncio.shield`: its error goes to them and to
    `on_error`, and asyncio does not log it if all of them have stopped waiting."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: _report_error(task, on_error))
    return task


async def run_together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs all of `work` concurrently; the results in its order.

    If one fails, the others are cancelled and awaited, and its error is raised without an exception group,
    so that callers can catch an InfrastructureError directly.
    """
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(part) for part in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def finish_all(work: Iterable[Awaitable[object]]) -> None:
    """Runs all of `work` concurrently, each to its end; then raises the first failure, if there is any."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def gather_bounded(
    work: Callable[[Item], Awaitable[Result]],
    items: Iterable[Item],
    at_once: int,
    on_done: Callable[[int], object] = lambda num_done: None,
) -> list[Result]:
    """Runs `work` on each item, at most `at_once` concurrently; the results in the order of the items.

    `on_done` is called with the number of items done so far. Errors as in `run_together`.
    """
    places, num_done = asyncio.Semaphore(at_once), 0

    async def run(item: Item) -> Result:
        nonlocal num_done
        async with places:
            result = await work(item)
        num_done += 1
        on_done(num_done)
        return result

    return await run_together(map(run, items))


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until they have ended. Does not raise their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless(work: Awaitable[Result], end: Awaitable[object], error: Exception) -> Result:
    """The result of `work`; raises `error` if `end` completes first. On return both have ended, by themselves
    or cancelled."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        await end_tasks(working, ending)


async def finish_despite_cancel(work: Awaitable[Result]) -> Result:
    """Awaits `work` to its end even if the caller is cancelled, and raises the cancellation afterwards. For
    work that must not stop halfway."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        _report_error(task, lambda error: None)
        raise


async def finish_in_thread(
    work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Like `asyncio.to_thread`, but a cancelled caller waits, so that the thread's work never outlives it."""
    return await finish_despite_cancel(asyncio.to_thread(work, *args, **kwargs))


@contextlib.asynccontextmanager
async def sweeping(
    sweep: Callable[[], Awaitable[object]], idle_s: float, most_s: float
) -> AsyncIterator[None]:
    """Calls `sweep` periodically until the block ends: twice within `idle_s`, the idle timeout, and at least
    once in `most_s`. An error of `sweep` ends the sweeping, and is raised at the end of the block."""

    async def run() -> None:
        while True:
            await asyncio.sleep(min(most_s, max(idle_s / 2, _SHORTEST_SWEEP_S)))
            await sweep()

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def closing(items: AsyncIterator[Result]) -> AsyncIterator[AsyncIterator[Result]]:
    """Closes a generator at the end of the block that reads it, so that no unread items are computed."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


@contextlib.contextmanager
def explain_cancelled_call(explain: Callable[[], None]) -> Iterator[None]:
    """Wraps a task's await of a call. If only the call was cancelled, `explain` may raise the reason; if the
    task itself was, even at the same moment, the cancellation passes unchanged."""
    caller = asyncio.current_task()
    assert caller is not None, "something is awaited"
    num_cancelled = caller.cancelling()
    try:
        yield
    except asyncio.CancelledError:
        if caller.cancelling() == num_cancelled:
            explain()
        raise


def _report_error(task: asyncio.Future[Any], on_error: OnError) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        on_error(error)
