"""Emptying a host: what runs there moves to others, and what cannot move is put to sleep where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from etude.errors import EtudeError, InfrastructureError
from etude.kit.tasks import end_tasks
from etude.sandbox.errors import CapacityError, SandboxMissingError, Unsupported
from etude.sandbox.fleet.host import FleetHost
from etude.sandbox.fleet.hosts import Move, Placement
from etude.sandbox.fleet.registry import Registry
from etude.sandbox.fleet.sandbox import FleetSandbox
from etude.sandbox.interface import Sandbox
from etude.sandbox.types import SnapshotKind

Connect = Callable[[str], Awaitable[Sandbox]]

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of each sandbox of a drained host."""

    moved: tuple[str, ...]
    hibernated: tuple[str, ...]
    """Paused on the host: durable there, gone if the host goes for good."""
    failed: dict[str, EtudeError]
    """Still running on the host, each with the reason."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left on the host, not even asleep."""
        return not self.hibernated and not self.failed


async def drain(
    registry: Registry, connect: Connect, name: str, deadline_s: float, grace_s: float, parallel: int = 8
) -> DrainReport:
    """Places nothing more on a host and empties it, `parallel` sandboxes at a time.

    Calls in flight may end within `grace_s` before their sandbox moves; later ones wait for the move.
    Sandboxes being started there when the drain begins are waited for and moved too. Whatever is not done
    after `deadline_s` is reported as failed and runs on. The host stays closed until it is undrained.
    Raises ConfigError for an unknown host.
    """
    drainer = _Drainer(registry, connect, registry.host(name), grace_s, asyncio.Semaphore(parallel))
    await drainer.run(registry.clock() + deadline_s)
    return DrainReport(tuple(drainer.moved), tuple(drainer.hibernated), drainer.failed)


class _Drainer:
    """One drain under way."""

    def __init__(
        self,
        registry: Registry,
        connect: Connect,
        host: FleetHost,
        grace_s: float,
        slots: asyncio.Semaphore,
    ) -> None:
        self.moved: list[str] = []
        self.hibernated: list[str] = []
        self.failed: dict[str, EtudeError] = {}
        self._registry = registry
        self._connect = connect
        self._host = host
        self._grace_s = grace_s
        self._slots = slots

    async def run(self, end_s: float) -> None:
        """Moves what runs, then what was just being started."""
        seen: set[str] = set()
        while True:
            moves = self._registry.scheduler.drain(self._host.name, self._registry.clock())
            new = [move for move in moves if move.sandbox not in seen]
            for move in moves:
                if move.sandbox in seen and move.placement is not None:
                    self._registry.scheduler.cancel(move.placement.ticket)
            seen.update(move.sandbox for move in new)
            await self._all(new, end_s)
            await self._wait_for_starts(end_s)
            running = self._registry.scheduler.hosts[self._host.name].reservations.values()
            if self._registry.clock() >= end_s or all(
                r.sandbox is None or r.sandbox in seen for r in running
            ):
                return

    async def _wait_for_starts(self, end_s: float) -> None:
        reservations = self._registry.scheduler.hosts[self._host.name].reservations
        while any(reservation.sandbox is None for reservation in reservations.values()):
            if self._registry.clock() >= end_s:
                return
            await asyncio.sleep(_POLL_S)

    async def _all(self, moves: list[Move], end_s: float) -> None:
        tasks = {asyncio.ensure_future(self._one(move)): move for move in moves}
        if not tasks:
            return
        try:
            _, late = await asyncio.wait(tasks, timeout=max(0.0, end_s - self._registry.clock()))
        except asyncio.CancelledError:
            await end_tasks(*tasks)
            raise
        await end_tasks(*late)
        for task, move in tasks.items():
            if task.cancelled() and move.sandbox not in self.moved:
                self.failed[move.sandbox] = CapacityError(
                    "not moved before the deadline", field="sandbox", received=move.sandbox
                )
            elif not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _one(self, move: Move) -> None:
        """Moves one sandbox, else puts it to sleep, else says why not."""
        placement = move.placement
        try:
            async with self._slots:
                sandbox = await self._handle(move.sandbox)
                if sandbox is None:
                    self.hibernated.append(move.sandbox)
                    return
                reason = await self._move(sandbox, placement)
                if reason is not None:
                    await self._sleep(sandbox, reason)
        except SandboxMissingError:
            # It ended by itself in the meantime, which empties the host as well.
            return
        except InfrastructureError as error:
            self.failed[move.sandbox] = error
        finally:
            if placement is not None and move.sandbox not in self.moved:
                self._registry.scheduler.cancel(placement.ticket)

    async def _handle(self, sandbox_id: str) -> FleetSandbox | None:
        """The sandbox; None if it sleeps already and nobody holds it."""
        known = self._registry.handle(sandbox_id)
        if known is not None:
            return None if (await known.get_info()).state == "paused" else known
        rows = await self._host.call(self._host.backend.list())
        states = {f"{self._host.name}:{info.id}": info.state for info in rows}
        if states.get(sandbox_id) == "paused":
            return None
        await self._connect(sandbox_id)
        return self._registry.handle(sandbox_id)

    async def _move(self, sandbox: FleetSandbox, placement: Placement | None) -> EtudeError | None:
        """None once it runs on the other host; else the reason."""
        if placement is None:
            return CapacityError("no other host has room", field="sandbox", received=sandbox.id)
        before = (sandbox.host.name, sandbox.inner.id)
        try:
            await sandbox.relocate(self._registry.placed(placement), self._grace_s)
        except SandboxMissingError:
            raise
        except (InfrastructureError, Unsupported) as error:
            return error
        finally:
            # Also where this was cancelled too late to keep it where it was.
            if sandbox.host.name != before[0]:
                self._registry.moved(sandbox, before, placement)
                self.moved.append(sandbox.id)
        return None

    async def _sleep(self, sandbox: FleetSandbox, reason: EtudeError) -> None:
        able = self._host.backend.capabilities().pause
        mode: SnapshotKind | None = "full" if "full" in able else "filesystem" if able else None
        if mode is None:
            self.failed[sandbox.id] = reason
            return
        await sandbox.pause(mode)
        self.hibernated.append(sandbox.id)
