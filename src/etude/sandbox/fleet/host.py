"""One host of a fleet: its backend, its state, and calls that fail as soon as it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from etude.errors import InfrastructureError
from etude.kit.tasks import Tasks
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.fleet.hosts import NO_CAPACITY, Capacity
from etude.sandbox.fleet.probe import HostProbe, NoProbe
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.types import SandboxInfo

Result = TypeVar("Result")
Undo = Callable[[Any], Coroutine[Any, Any, Any]]
FetchCapacity = Callable[[], Awaitable[Capacity]]

CLEANUP_S = 5.0
"""How long a cancelled call may take to clean up before it is abandoned."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host as the user configures it."""

    backend: SandboxBackend
    capacity: Capacity | FetchCapacity = field(default_factory=lambda: Capacity(64, 512 << 30, 4 << 40))
    """Or a function that fetches it, called when the host answers for the first time."""
    probe: HostProbe = field(default_factory=NoProbe)
    owns: Callable[[SandboxInfo], bool] = lambda info: True
    """Whether a sandbox on the host belongs to this fleet. Others are neither counted nor killed; their use
    is part of the host's measured pressure."""


class FleetHost:
    """The runtime state of a host. For one event loop."""

    def __init__(self, name: str, spec: HostSpec) -> None:
        self.name = name
        self.backend = spec.backend
        self.probe = spec.probe
        self.owns = spec.owns
        self.capacity = spec.capacity if isinstance(spec.capacity, Capacity) else NO_CAPACITY
        self.fetch_capacity = None if isinstance(spec.capacity, Capacity) else spec.capacity
        """Fetches the capacity; None once it is known."""
        self.missed = 0
        """Number of heartbeats missed in a row."""
        self.last_error: str | None = None
        self._dead: asyncio.Future[None] | None = None
        self._abandoned = Tasks(on_error=self._on_undo_error)

    def id_of(self, inner_id: str) -> str:
        """The fleet-wide id of the sandbox or snapshot `inner_id` of this host."""
        return f"{self.name}:{inner_id}"

    @property
    def is_dead(self) -> bool:
        """Whether the host is dead: calls fail at once."""
        return self._dead is not None and self._dead.done()

    def mark_dead(self, reason: str) -> None:
        """Fails the calls in flight, and all later ones, with SandboxLostError. Idempotent."""
        self.last_error = reason
        dead = self._dead_future()
        if not dead.done():
            dead.set_result(None)

    def revive(self) -> None:
        """Marks a host alive that answers again, as an empty one."""
        self._dead = None
        self.missed = 0

    def lost_error(self, sandbox: str | None = None) -> SandboxLostError:
        """The error for a sandbox of this dead host; without `sandbox`, for the host."""
        return SandboxLostError(
            f"host {self.name} died: {self.last_error or 'no heartbeat'}",
            field="sandbox",
            received=sandbox or self.name,
            fix="start the session again; the fleet places it on another host",
        )

    async def call(
        self,
        operation: Coroutine[Any, Any, Result],
        undo: Undo | None = None,
        timeout_s: float | None = None,
    ) -> Result:
        """The operation's result, or SandboxLostError as soon as the host dies. Raises TimeoutError after
        `timeout_s`, even if the operation cannot be cancelled.

        An operation that is abandoned (the host died, the caller was cancelled) and succeeds all the same is
        undone: `undo` is called with its result.
        """
        if self.is_dead:
            operation.close()
            raise self.lost_error()
        task = asyncio.ensure_future(operation)
        dead = self._dead_future()
        try:
            await asyncio.wait((task, dead), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            try:
                await asyncio.wait((task, dead), timeout=CLEANUP_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._abandon(task, undo)
            raise
        if not task.done():
            self._abandon(task, undo)
            if not dead.done():
                raise TimeoutError(f"host {self.name} did not answer within {timeout_s} s")
            raise self.lost_error()
        try:
            return task.result()
        except (InfrastructureError, OSError) as error:
            if self.is_dead:
                raise self.lost_error() from error
            raise

    async def wait_for_abandoned(self) -> None:
        """Waits for abandoned operations and their undoing, at most `CLEANUP_S`."""
        await self._abandoned.wait(CLEANUP_S)

    def _dead_future(self) -> asyncio.Future[None]:
        if self._dead is None:
            self._dead = asyncio.get_running_loop().create_future()
        return self._dead

    def _abandon(self, task: asyncio.Future[Any], undo: Undo | None) -> None:
        """Cancels a task without waiting for it; a late result is undone, a late error is ignored."""
        task.cancel()
        self._abandoned.start(self._undo_late(task, undo))

    async def _undo_late(self, task: asyncio.Future[Any], undo: Undo | None) -> None:
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is None and undo is not None:
            await undo(task.result())

    def _on_undo_error(self, error: BaseException) -> None:
        self.last_error = f"a late start could not be undone: {error}"


async def kill(sandbox: Sandbox) -> None:
    """Kills a sandbox: the `undo` of its creation."""
    await sandbox.kill()
