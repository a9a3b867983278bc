"""Parts that are plain objects in this process.

A LocalHandle by itself calls its part in the caller's thread, in the caller's order, so that a run is
reproducible bit for bit. The LocalExecutor gives each part one thread in which it is made and computes, one
call after another, while the event loop, and with it the part's asynchronous methods, keeps running: a run
that borrows replicas must reach them while its trainer computes. It is arranged as over Ray
(`remote/arrangement.py`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from etude.errors import PartLostError
from etude.kit.tasks import Tasks, explain_cancelled_call, start_watched
from etude.protocols import Handle, Resources

T = TypeVar("T")


class LocalHandle(Handle[T]):
    """A Handle of a part in this process. For one event loop."""

    def __init__(
        self,
        part: T,
        num_threads: int | None = None,
        name: str = "",
        compute: ThreadPoolExecutor | None = None,
    ) -> None:
        """`num_threads`: compute threads while the part is called; None leaves them as they are. `compute`:
        its own thread, in which methods that are not asynchronous run."""
        self.part = part
        self._num_threads = num_threads
        self._name = name
        self._compute = compute
        self._dead = False
        self._running = Tasks()

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        self._check_alive()
        function = getattr(self.part, method)
        if self._compute is not None and not inspect.iscoroutinefunction(function):
            computed = self._compute.submit(lambda: function(*arguments, **named))
            return await self._unless_killed(asyncio.wrap_future(computed))
        before = torch.get_num_threads()
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            answer = function(*arguments, **named)
        finally:
            torch.set_num_threads(before)
        return await self._unless_killed(answer) if inspect.isawaitable(answer) else answer

    async def stop(self) -> None:
        """See Handle.stop. Waits for what the part computes, and for its own `close`, if it has one."""
        if not self._dead:
            try:
                if hasattr(self.part, "close"):
                    await self.send("close", (), {})
            finally:
                self._end()
                if self._compute is not None:
                    await asyncio.to_thread(self._compute.shutdown)
        await self._running.wait()

    def kill(self) -> None:
        """See Handle.kill: calls in progress are cancelled, and the part is never called again. A computation
        in a thread cannot be ended: it is no longer awaited, and no other starts after it. If a part with
        such a thread has an asynchronous `close`, that ends what the part has started in this loop."""
        if self._dead:
            return
        self._end()
        close = getattr(self.part, "close", None)
        if self._compute is not None and inspect.iscoroutinefunction(close):
            self._running.add(start_watched(close()))  # in whatever state the part is

    def _end(self) -> None:
        self._dead = True
        self._running.cancel()
        if self._compute is not None:
            self._compute.shutdown(wait=False, cancel_futures=True)

    async def _unless_killed(self, answer: Awaitable[Any]) -> Any:
        running = self._running.add(asyncio.ensure_future(answer))
        with explain_cancelled_call(self._check_alive):
            return await running

    def _check_alive(self) -> None:
        if self._dead:
            raise PartLostError("was killed", field=self._name or type(self.part).__name__)


class LocalExecutor:
    """Implements Executor: each part computes in a thread of its own."""

    def __init__(self) -> None:
        self._handles: list[LocalHandle[Any]] = []

    async def reserve(self, parts: Sequence[Resources]) -> None:
        """See Executor.reserve. Does nothing: the parts share the process's resources."""

    async def make_room(self, part: Resources) -> None:
        """See Executor.make_room. Does nothing."""

    def release_room(self, part: str) -> None:
        """See Executor.release_room. Does nothing."""

    async def spawn(
        self, factory: Callable[..., T], *arguments: Any, resources: Resources | None = None, **named: Any
    ) -> LocalHandle[T]:
        """See Executor.spawn. Of `resources` only the part's name is used: the part has as many compute
        threads as the caller, unless it sets another number."""
        name = (resources.part if resources is not None else "") or getattr(factory, "__name__", "part")
        count = (torch.get_num_threads(),)  # PyTorch keeps it for each thread
        compute = ThreadPoolExecutor(1, f"{name}-compute", torch.set_num_threads, count)
        try:
            made = compute.submit(lambda: factory(*arguments, **named))
            handle = LocalHandle(await asyncio.wrap_future(made), name=name, compute=compute)
        except BaseException:
            compute.shutdown(wait=False, cancel_futures=True)
            raise
        self._handles.append(handle)
        return handle

    async def shutdown(self) -> None:
        """See Executor.shutdown: last made, first stopped."""
        while self._handles:
            await self._handles.pop().stop()
