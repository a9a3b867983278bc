"""The local executor: every part is a plain object in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import torch

from etude.errors import PartLostError
from etude.inference.waiting import ended_by_others
from etude.protocols import Resources

T = TypeVar("T")


class LocalHandle(Generic[T]):
    """A part in this process. Calls run in the caller's thread, in the caller's order."""

    node = ""
    """See Handle.node."""

    def __init__(self, part: T, num_threads: int | None = None, name: str = "") -> None:
        """`num_threads`: compute threads while the part is called; None leaves them as they are."""
        self.part = part
        self._num_threads = num_threads
        self._name = name
        self._dead = False
        self._running: set[asyncio.Future[Any]] = set()

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """See Handle.call."""
        self._check_alive()
        before = torch.get_num_threads()
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            answer = getattr(self.part, method)(*arguments, **named)
        finally:
            torch.set_num_threads(before)
        return await self._unless_killed(answer) if inspect.isawaitable(answer) else answer

    async def stop(self) -> None:
        """See Handle.stop. Calls the part's own `close`, if it has one."""
        close = getattr(self.part, "close", None)
        if close is not None and not self._dead:
            answer = close()
            if inspect.isawaitable(answer):
                await answer

    def kill(self) -> None:
        """See Handle.kill: what is under way is cancelled, and the part is never called again."""
        self._dead = True
        for running in self._running:
            running.cancel()

    async def _unless_killed(self, answer: Awaitable[Any]) -> Any:
        running = asyncio.ensure_future(answer)
        self._running.add(running)
        try:
            with ended_by_others(self._check_alive):
                return await running
        finally:
            self._running.discard(running)

    def _check_alive(self) -> None:
        if self._dead:
            raise PartLostError("was killed", field=self._name or type(self.part).__name__)


class LocalExecutor:
    """Makes parts where it is."""

    def __init__(self) -> None:
        self._handles: list[LocalHandle[Any]] = []

    async def spawn(
        self, factory: Callable[..., T], *arguments: Any, resources: Resources | None = None, **named: Any
    ) -> LocalHandle[T]:
        """See Executor.spawn. `resources.num_cpus` is how many compute threads the part's calls have."""
        num_threads = max(1, int(resources.num_cpus)) if resources is not None else None
        name = resources.part if resources is not None else ""
        handle = LocalHandle(factory(*arguments, **named), num_threads, name)
        self._handles.append(handle)
        return handle

    async def shutdown(self) -> None:
        """See Executor.shutdown: last made, first stopped."""
        while self._handles:
            await self._handles.pop().stop()
