"""A sandbox of the fleet: the sandbox of a host. Calls end with SandboxLostError as soon as the host is known
to be dead, those in flight included.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from etude.errors import InfrastructureError, SandboxError
from etude.sandbox.errors import CapacityError, SandboxLostError, SandboxMissingError
from etude.sandbox.fleet.host import FleetHost, Undo, kill
from etude.sandbox.fleet.hosts import Placement
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.migration import gather_copies
from etude.sandbox.refusals import check_count
from etude.sandbox.types import SandboxInfo, SnapshotInfo, SnapshotKind
from etude.sandbox.wrapping import Operation, WrappedSandbox

if TYPE_CHECKING:
    from etude.sandbox.fleet.registry import Registry

Result = TypeVar("Result")


class FleetSandbox(WrappedSandbox):
    """`Sandbox` on a host."""

    def __init__(self, registry: Registry, host: FleetHost, inner: Sandbox) -> None:
        super().__init__(host.id_of(inner.id))
        self.host = host
        self.inner = inner
        self._registry = registry
        self._gone: SandboxError | None = None

    async def perform(self, name: str, operation: Operation[Result]) -> Result:
        return await self.attempt(operation)

    async def attempt(self, operation: Operation[Result], undo: Undo | None = None) -> Result:
        """One operation on the host's sandbox. Raises SandboxLostError once the host is dead."""
        if self._gone is not None:
            raise self._gone
        try:
            return await self.host.call(operation(self.inner), undo)
        except (SandboxLostError, SandboxMissingError) as error:
            if isinstance(error, SandboxLostError):
                self._registry.suspect(self.host, error)
            self.end(error)
            self._registry.forget(self)
            raise

    def end(self, reason: SandboxError) -> None:
        """Every later call raises `reason`."""
        self._gone = self._gone or reason

    async def get_info(self) -> SandboxInfo:
        return replace(await super().get_info(), id=self.id)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """See Sandbox.create_snapshot. It lies on the sandbox's host, and is restored there."""
        info = await super().create_snapshot(kind, name)
        return replace(info, id=self.host.id_of(info.id), sandbox_id=self.id)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Copies stay on the same host while there is room; others are migrated."""
        check_count(count)
        try:
            return await self._fork(count)
        finally:
            self._registry.queue.serve()

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate. Moves it out of the fleet, to a backend that the caller names."""
        moved = await self.attempt(lambda s: s.migrate(target), kill)
        self.end(SandboxMissingError("the sandbox left the fleet", field="sandbox", received=self.id))
        self._registry.forget(self)
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
        self._registry.forget(self)

    async def _fork(self, count: int) -> list[Sandbox | SandboxError]:
        """`count` results: a sandbox, or the error that prevented it. Unused places are given back."""
        scheduler = self._registry.scheduler
        places = scheduler.place_fork(self.id, count, self._registry.clock())
        can_move = self.host.backend.capabilities().migrate is not None
        for number, place in enumerate(places):
            if place is not None and place.host != self.host.name and not can_move:
                scheduler.cancel(place.ticket)
                places[number] = None
        used = [place for place in places if place is not None]
        try:
            copies = await self.attempt(lambda s: s.fork(len(used)), _kill_all) if used else []
        except BaseException:
            for place in used:
                scheduler.cancel(place.ticket)
            raise
        settling = [self._settle(place, copy) for place, copy in zip(used, copies, strict=True)]
        settled = iter(await gather_copies(settling))
        return [_no_room(self.id) if place is None else next(settled) for place in places]

    async def _settle(self, place: Placement, copy: Sandbox | SandboxError) -> Sandbox:
        """A copy on the host for which it was planned. Raises SandboxError."""
        registry, host = self._registry, self.host
        if isinstance(copy, SandboxError):
            registry.scheduler.cancel(place.ticket)
            raise copy
        try:
            if place.host != host.name:
                copy = await self._move(copy, place)
            host = registry.placed(place)
            registry.scheduler.confirm(place.ticket, host.id_of(copy.id), registry.clock())
        except SandboxMissingError as error:
            # The target died in between, and took its reservations along.
            raise host.lost() from error
        except BaseException as error:
            registry.scheduler.cancel(place.ticket)
            if isinstance(error, InfrastructureError) and not isinstance(error, SandboxError):
                raise SandboxError(str(error), field="sandbox", received=self.id) from error
            raise
        return registry.wrap(host, copy)

    async def _move(self, copy: Sandbox, place: Placement) -> Sandbox:
        try:
            target = self._registry.placed(place)
            return await self.host.call(copy.migrate(target.backend), kill)
        except BaseException:
            if not self.host.is_dead:
                await asyncio.shield(copy.kill())
            raise


def _no_room(sandbox_id: str) -> CapacityError:
    return CapacityError(
        "no host has room for another copy, or none to which it can move",
        field="sandbox",
        received=sandbox_id,
        fix="fork fewer, or add hosts",
    )


async def _kill_all(copies: list[Sandbox | SandboxError]) -> None:
    for copy in copies:
        if not isinstance(copy, SandboxError):
            await copy.kill()
