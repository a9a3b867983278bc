"""A sandbox of the fleet: the sandbox of a host. Calls end with SandboxLostError as soon as the host is known
to be dead, those in flight included.
"""

from __future__ import annotations

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
    """`Sandbox` on a host."""

    def __init__(self, owner: Fleet, host: FleetHost, inner: Sandbox) -> None:
        super().__init__(host.id_of(inner.id))
        self.host = host
        self.inner = inner
        self._owner = owner
        self._gone: SandboxError | None = None

    async def perform(self, name: str, operation: Operation[Result]) -> Result:
        """See WrappedSandbox.perform."""
        return await self.attempt(operation)

    async def attempt(self, operation: Operation[Result], undo: Undo | None = None) -> Result:
        """One operation on the host's sandbox. Raises SandboxLostError once the host is dead."""
        if self._gone is not None:
            raise self._gone
        try:
            return await self.host.call(operation(self.inner), undo)
        except (SandboxLostError, SandboxMissingError) as error:
            if isinstance(error, SandboxLostError):
                self._owner.suspect(self.host)
            self.end(error)
            self._owner.forget(self)
            raise

    def end(self, reason: SandboxError) -> None:
        """Every later call raises `reason`."""
        self._gone = self._gone or reason

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
        return replace(info, id=self.host.id_of(info.id), sandbox_id=self.id)

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
