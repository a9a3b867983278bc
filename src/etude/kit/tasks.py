"""Work that goes on in an event loop beside the code that began it; nothing that goes wrong in it is lost."""

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
"""From so many bytes or characters on, work on them is done in a thread."""


async def off_loop(
    size: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """The function's result; in a thread where it works on so many bytes or characters that the loop would
    stall."""
    if size < LARGE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class Tasks:
    """A set of tasks, each of which leaves it when it ends. For one event loop.

    Its length is the number of tasks that run.
    """

    def __init__(self, on_error: OnError | None = None) -> None:
        """`on_error`: called with what a task raises. Without it an error goes to the code that awaits the
        task, and asyncio logs one that nobody awaits."""
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
        """Takes over a task that was begun elsewhere."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancels all; they end when the loop gets to them."""
        for task in self:
            task.cancel()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Waits until those that run now have ended; no longer than `timeout_s`. Raises nothing of theirs."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)

    async def close(self) -> None:
        """Cancels all, and waits until they have ended; those that are begun meanwhile too."""
        while self._tasks:
            self.cancel()
            await self.wait()

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if self._on_error is not None:
            _note_error(task, self._on_error)


class Changes:
    """Wakes all that wait whenever something may have changed. For one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        change, self._next = self._next, asyncio.Event()
        change.set()

    async def wait(self) -> None:
        """Waits for the next change."""
        await self._next.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for the change after which `holds`; not at all where it does already."""
        while not holds():
            await self.wait()


def start_watched(
    work: Coroutine[Any, Any, Result], on_error: OnError = lambda error: None
) -> asyncio.Task[Result]:
    """A task that several may await, through `asyncio.shield`: its error goes to them and to `on_error`, and
    is not logged where none of them waits any more."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: _note_error(task, on_error))
    return task


async def run_together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in the order of `work`, all of which runs at once.

    If one fails, the others are cancelled and waited for, and its error comes out as it was raised: who
    catches an InfrastructureError must not have to look into exception groups.
    """
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(part) for part in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def finish_all(work: Iterable[Awaitable[object]]) -> None:
    """Awaits all of `work` at once, each to its end; then raises the first failure, if there is any."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def gather_bounded(
    work: Callable[[Item], Awaitable[Result]],
    items: Iterable[Item],
    at_once: int,
    on_done: Callable[[int], object] = lambda num_done: None,
) -> list[Result]:
    """What `work` gives for each item, in their order; `at_once` of them are under way at the same time.

    `on_done` is called with the number of those that are done. Errors as of `run_together`.
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
    """Cancels tasks, and waits until they have ended. Raises nothing of theirs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless(work: Awaitable[Result], end: Awaitable[object], error: Exception) -> Result:
    """What `work` gives, unless `end` comes first: then `error` is raised. By then both have ended, either of
    their own or cancelled."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        await end_tasks(working, ending)


async def to_the_end(work: Awaitable[Result]) -> Result:
    """Awaits `work`; a caller that is cancelled, however often, waits for its end all the same. For what must
    not stop halfway."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        _note_error(task, lambda error: None)
        raise


async def finish_in_thread(
    work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Like `asyncio.to_thread`, but a cancelled caller waits: nothing goes on behind it."""
    return await to_the_end(asyncio.to_thread(work, *args, **kwargs))


@contextlib.asynccontextmanager
async def closing(items: AsyncIterator[Result]) -> AsyncIterator[AsyncIterator[Result]]:
    """Ends a generator with the block that reads it, so that nobody computes what nobody reads."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


@contextlib.contextmanager
def ended_by_others(explain: Callable[[], None]) -> Iterator[None]:
    """For the block in which a task waits for a call. Where not the task is cancelled but the call, `explain`
    may raise why; a task that is cancelled itself, even if at the same moment, gets that alone."""
    caller = asyncio.current_task()
    assert caller is not None, "something is awaited"
    num_cancelled = caller.cancelling()
    try:
        yield
    except asyncio.CancelledError:
        if caller.cancelling() == num_cancelled:
            explain()
        raise


def _note_error(task: asyncio.Future[Any], on_error: OnError) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        on_error(error)
