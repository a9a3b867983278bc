"""One sandbox of a pool: the inner backend's, and the place that it holds while it lives."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etude.errors import SandboxError
from etude.kit.tasks import to_the_end
from etude.sandbox.errors import SandboxMissingError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.refusals import check_count
from etude.sandbox.types import SandboxInfo, SnapshotKind
from etude.sandbox.wrapping import WrappedSandbox

if TYPE_CHECKING:
    from etude.sandbox.pool import PooledBackend

TENANT = "tenant"
"""The key of a sandbox's metadata that says whose turn it takes."""


class PooledSandbox(WrappedSandbox):
    """`Sandbox` that gives its place back exactly once: paused, killed, moved, expired or lost."""

    def __init__(self, pool: PooledBackend, inner: Sandbox, metadata: Mapping[str, str] | None) -> None:
        """`metadata`: the caller's, where it may differ from what the inner sandbox was made with."""
        super().__init__(inner.id)
        self._pool = pool
        self._inner = inner
        self._metadata = metadata
        self._lifecycle = asyncio.Lock()
        self._held = True
        self._ending = asyncio.Lock()
        self._ends = False

    async def reach(self, operation: str) -> Sandbox:
        return self._inner

    def described(self, info: SandboxInfo) -> SandboxInfo:
        """What is known of it, with the caller's metadata."""
        return info if self._metadata is None else dataclasses.replace(info, metadata=dict(self._metadata))

    async def look(self) -> None:
        """Gives its place back if it has ended by itself: nobody who asks for it finds it any more."""
        if self._lifecycle.locked():
            return  # it falls asleep, wakes or moves, and sees to its place itself
        async with self._lifecycle:
            state = (await self._inner.get_info()).state
            if state != "running":
                self._free()
            if state == "killed":
                self._pool.forget(self)

    async def get_info(self) -> SandboxInfo:
        return self.described(await self._inner.get_info())

    async def set_timeout(self, timeout_s: float | None) -> None:
        await self._inner.set_timeout(timeout_s)
        self._pool.expect_end(timeout_s)

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """See Sandbox.pause. The place is given back."""
        async with self._lifecycle:
            await self._inner.pause(mode)
            self._free()

    async def resume(self) -> None:
        """See Sandbox.resume. Waits for a place. Raises CapacityError."""
        async with self._lifecycle:
            if self._held:
                await self._inner.resume()
                return
            await self._pool.acquire(await self._tenant())
            if self._ends:
                self._pool.give_back()
                raise SandboxMissingError(
                    "the sandbox was killed", field="sandbox", received=self.id, fix="make another one"
                )
            self._held = True
            try:
                await self._inner.resume()
            except BaseException:
                self._free()
                raise

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Waits for `count` places together. Raises CapacityError."""
        check_count(count)
        await self._pool.acquire(await self._tenant(), count)
        try:
            copies = await self._inner.fork(count)
        except BaseException:
            self._pool.give_back(count)
            raise
        result: list[Sandbox | SandboxError] = []
        for copy in copies:
            if isinstance(copy, SandboxError):
                self._pool.give_back()
                result.append(copy)
            else:
                result.append(self._pool.adopt(copy, self._metadata))
        return result

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        async with self._lifecycle:
            moved = await self._inner.migrate(target)
            self._free()
        self._pool.forget(self)
        return moved

    async def kill(self) -> None:
        """See Sandbox.kill. The place is given back once the inner sandbox is dead."""
        self._ends = True
        await to_the_end(self._kill())

    async def _kill(self) -> None:
        async with self._ending:
            await self._inner.kill()
        self._free()
        self._pool.forget(self)

    async def _tenant(self) -> str:
        return (await self.get_info()).metadata.get(TENANT, "")

    def _free(self) -> None:
        if self._held:
            self._held = False
            self._pool.give_back()
