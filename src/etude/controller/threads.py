"""The local executor of runs whose parts work at once: each has threads of its own in this process.

    run's loop ──call──> part's loop: asynchronous methods, which answer while others compute
                             └──────> part's compute thread: the others, one after another

A run that borrows replicas hears of them while its trainer computes, so it is put together as over Ray
(`remote/arrangement.py`), and does not repeat bit for bit either. See `local` for the executor that does.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from etude.errors import PartLostError
from etude.inference.waiting import ended_by_others
from etude.kit.tasks import Tasks
from etude.protocols import Resources

T = TypeVar("T")


class ThreadHandle(Generic[T]):
    """Implements Handle over a part in threads of this process. Called from one event loop."""

    node = ""
    """See Handle.node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._part: Any = None
        self._ended = False
        self._calls = Tasks()
        # The caller's number of compute threads, which PyTorch keeps for each thread: a part may set another.
        num_threads = (torch.get_num_threads(),)
        self._compute = ThreadPoolExecutor(1, f"{name}-compute", torch.set_num_threads, num_threads)
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        arguments = (started, *num_threads)
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()
        self._loop, self._leave = started.result()

    async def make(self, factory: Callable[..., T], arguments: Sequence[Any], named: dict[str, Any]) -> None:
        """Makes the part, where it computes. Raises what the factory raises."""
        self._part = await self._within(self._computed(lambda: factory(*arguments, **named)))

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """See Handle.call."""
        self._check_alive()
        function = getattr(self._part, method)
        if inspect.iscoroutinefunction(function):
            return await self._within(function(*arguments, **named))
        return await self._within(self._computed(lambda: function(*arguments, **named)))

    async def stop(self) -> None:
        """See Handle.stop: waits for what the part computes, and for its own `close`, if it has one."""
        if self._ended:
            return
        try:
            if hasattr(self._part, "close"):
                await self.call("close")
        finally:
            self.kill()
            await asyncio.to_thread(self._compute.shutdown)
            await asyncio.to_thread(self._thread.join)

    def kill(self) -> None:
        """See Handle.kill. A thread cannot be ended in the middle of a computation: nobody waits for it any
        more, and nothing is begun after it."""
        if self._ended:
            return
        self._ended = True
        self._compute.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._leave.set)
        self._calls.cancel()

    def _run(
        self, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]], num_threads: int
    ) -> None:
        async def live() -> None:
            torch.set_num_threads(num_threads)
            leave = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), leave))
            await leave.wait()

        asyncio.run(live())  # which cancels what the part has still under way

    async def _within(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs in the part's loop; cancelled there if it is cancelled here."""
        call = self._calls.add(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop)))
        with ended_by_others(self._check_alive):
            return await call

    async def _computed(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    def _check_alive(self) -> None:
        if self._ended:
            raise PartLostError("was killed", field=self.name)


class ThreadExecutor:
    """Implements PartExecutor: starts parts in threads."""

    def __init__(self) -> None:
        self._handles: list[ThreadHandle[Any]] = []

    async def reserve(self, parts: Sequence[Resources]) -> None:
        """See PartExecutor.reserve. Threads share what the process has."""

    async def spawn(
        self, factory: Callable[..., T], *arguments: Any, resources: Resources | None = None, **named: Any
    ) -> ThreadHandle[T]:
        """See Executor.spawn. Of `resources` only the part's name counts."""
        name = resources.part if resources is not None else ""
        handle: ThreadHandle[T] = ThreadHandle(name or getattr(factory, "__name__", "part"))
        try:
            await handle.make(factory, arguments, named)
        except BaseException:
            handle.kill()
            raise
        self._handles.append(handle)
        return handle

    async def shutdown(self) -> None:
        """See Executor.shutdown: last made, first stopped."""
        while self._handles:
            await self._handles.pop().stop()
