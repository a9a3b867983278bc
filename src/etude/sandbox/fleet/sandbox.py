"""A sandbox of the fleet: the sandbox of a host, wherever it lives now.

Its id stays when it moves to another host. Each call waits while it moves, and ends with SandboxLostError
as soon as its host is known to be dead, calls in flight included.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from etude.errors import SandboxError
from etude.sandbox.errors import SandboxLostError, SandboxMissingError
from etude.sandbox.fleet.host import FleetHost, Undo, kill
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.types import SandboxInfo, SnapshotInfo, SnapshotKind
from etude.sandbox.wrapping import Operation, WrappedSandbox

if TYPE_CHECKING:
    from etude.sandbox.fleet.fleet import Fleet

Result = TypeVar("Result")


class FleetSandbox(WrappedSandbox):
    """`Sandbox` on a host that may change."""

    def __init__(self, owner: Fleet, sandbox_id: str, host: FleetHost, inner: Sandbox) -> None:
        super().__init__(sandbox_id)
        self.host = host
        self.inner = inner
        self._owner = owner
        self._gone: SandboxError | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def is_moving(self) -> bool:
        """Whether it is on its way to another host."""
        return not self._settled.is_set()

    async def perform(self, name: str, operation: Operation[Result]) -> Result:
        """See WrappedSandbox.perform."""
        return await self.attempt(operation)

    async def attempt(self, operation: Operation[Result], undo: Undo | None = None) -> Result:
        """One operation on the sandbox where it lives. Raises SandboxLostError once its host is dead."""
        await self._settled.wait()
        if self._gone is not None:
            raise self._gone
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self.host.call(operation(self.inner), undo)
        except (SandboxLostError, SandboxMissingError) as error:
            if isinstance(error, SandboxLostError):
                self._owner.suspect(self.host)
            self.end(error)
            self._owner.forget(self)
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def end(self, reason: SandboxError) -> None:
        """Every later call raises `reason`; those that wait for a move, too."""
        self._gone = self._gone or reason
        self._settled.set()

    async def relocate(self, target: FleetHost, grace_s: float) -> None:
        """Moves to another host. Calls in flight may end within `grace_s`; later ones wait.

        Raises what the migration raises; the sandbox is then where it was.
        """
        if not self._settled.is_set():
            raise SandboxError("the sandbox is moving already", field="sandbox", received=self.id)
        self._settled.clear()
        try:
            idle = asyncio.ensure_future(self._idle.wait())
            await asyncio.wait((idle,), timeout=grace_s)
            idle.cancel()
            if self._gone is not None:
                raise self._gone
            await self.host.call(self._move_to(target))
        finally:
            self._settled.set()

    async def _move_to(self, target: FleetHost) -> None:
        """A move that has happened holds, also where whoever asked for it has been cancelled meanwhile."""
        source = self.host
        inner = await self.inner.migrate(target.backend)
        if source.is_dead or self._gone is not None:
            await inner.kill()
            raise self._gone or source.lost(self.id)
        self.host, self.inner = target, inner

    def rebind(self, inner: Sandbox) -> None:
        """The same sandbox by a new handle of the same host."""
        self.inner = inner

    async def get_info(self) -> SandboxInfo:
        """See Sandbox.get_info."""
        return replace(await super().get_info(), id=self.id)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """See Sandbox.create_snapshot. It lies on the sandbox's host, and is restored there."""
        info = await super().create_snapshot(kind, name)
        return replace(info, id=f"{self.host.name}:{info.id}", sandbox_id=self.id)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Copies stay on the same host while there is room; others are migrated."""
        return await self._owner.fork(self, count)

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate. Moves it out of the fleet, to a backend that the caller names."""
        moved = await self.attempt(lambda s: s.migrate(target), kill)
        self.end(SandboxMissingError("the sandbox left the fleet", field="sandbox", received=self.id))
        self._owner.forget(self)
        return moved

    async def kill(self) -> None:
        """See Sandbox.kill. Also when its host is dead: there is nothing left to kill then."""
        if self._gone is not None:
            return
        try:
            await super().kill()
        except (SandboxLostError, SandboxMissingError):
            return
        self.end(SandboxMissingError("the sandbox was killed", field="sandbox", received=self.id))
        self._owner.forget(self)
