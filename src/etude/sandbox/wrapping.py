"""Base class of sandboxes that wrap another one: every operation calls `perform`, which calls `reach`; these
may wait, count, refuse or fail.

Subclasses override them, as for a sandbox that is still being created, one that fails on purpose, or one that
holds a place in a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from etude.errors import SandboxError
from etude.sandbox.calls import Answer
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.types import SandboxInfo, SnapshotInfo, SnapshotKind

Result = TypeVar("Result")
Operation = Callable[[Sandbox], Coroutine[Any, Any, Result]]


class WrappedSandbox(Sandbox):
    """A sandbox that delegates to an inner one; subclasses implement `reach`, or override `perform`."""

    async def reach(self, operation: str) -> Sandbox:
        """The inner sandbox for an operation: a method (`fork`), or the `op` of a call (`read`)."""
        raise NotImplementedError

    async def perform(self, name: str, operation: Operation[Result]) -> Result:
        """Performs an operation on the inner sandbox; `name` as in `reach`."""
        return await operation(await self.reach(name))

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        return await self.perform(header["op"], lambda s: s.call(header, payload, on_output))

    async def get_info(self) -> SandboxInfo:
        return await self.perform("get_info", lambda s: s.get_info())

    async def set_timeout(self, timeout_s: float | None) -> None:
        await self.perform("set_timeout", lambda s: s.set_timeout(timeout_s))

    async def pause(self, mode: SnapshotKind = "full") -> None:
        await self.perform("pause", lambda s: s.pause(mode))

    async def resume(self) -> None:
        await self.perform("resume", lambda s: s.resume())

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        return await self.perform("create_snapshot", lambda s: s.create_snapshot(kind, name))

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        return await self.perform("fork", lambda s: s.fork(count))

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        return await self.perform("migrate", lambda s: s.migrate(target))

    async def kill(self) -> None:
        await self.perform("kill", lambda s: s.kill())
