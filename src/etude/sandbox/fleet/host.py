"""One host of a fleet: its backend, whether it lives, and calls that end when it dies."""

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
AskCapacity = Callable[[], Awaitable[Capacity]]

CLEANUP_S = 5.0
"""How long a cancelled call may take to tidy up before it is left behind."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host as the user names it."""

    backend: SandboxBackend
    capacity: Capacity | AskCapacity = field(default_factory=lambda: Capacity(64, 512 << 30, 4 << 40))
    """Or how to ask the host for it, which is done when it answers for the first time."""
    probe: HostProbe = field(default_factory=NoProbe)
    owns: Callable[[SandboxInfo], bool] = lambda info: True
    """Which of the sandboxes there are this fleet's. Others are neither counted nor killed; what they
    use shows in the host's pressure."""


class FleetHost:
    """A host while the fleet runs. For one event loop."""

    def __init__(self, name: str, spec: HostSpec) -> None:
        self.name = name
        self.backend = spec.backend
        self.probe = spec.probe
        self.owns = spec.owns
        self.capacity = spec.capacity if isinstance(spec.capacity, Capacity) else NO_CAPACITY
        self.ask_capacity = None if isinstance(spec.capacity, Capacity) else spec.capacity
        """None once it is known."""
        self.missed = 0
        """Heartbeats missed in a row."""
        self.last_error: str | None = None
        self._death: asyncio.Future[None] | None = None
        self._abandoned = Tasks(on_error=self._note_undoing_error)

    def id_of(self, inner_id: str) -> str:
        """The fleet's id of what this host calls `inner_id`."""
        return f"{self.name}:{inner_id}"

    @property
    def is_dead(self) -> bool:
        """Whether it counts as dead: calls fail at once."""
        return self._death is not None and self._death.done()

    def die(self, reason: str) -> None:
        """Ends the calls in flight with SandboxLostError, and all later ones. Idempotent."""
        self.last_error = reason
        death = self._future()
        if not death.done():
            death.set_result(None)

    def revive(self) -> None:
        """It answers again, as an empty host."""
        self._death = None
        self.missed = 0

    def lost(self, sandbox: str | None = None) -> SandboxLostError:
        """What is raised for all that ran there."""
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

        An operation that is left behind (the host died, the caller was cancelled) and succeeds
        all the same is undone: `undo` is called with its result.
        """
        if self.is_dead:
            operation.close()
            raise self.lost()
        task = asyncio.ensure_future(operation)
        death = self._future()
        try:
            await asyncio.wait((task, death), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            try:
                await asyncio.wait((task, death), timeout=CLEANUP_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._abandon(task, undo)
            raise
        if not task.done():
            self._abandon(task, undo)
            if not death.done():
                raise TimeoutError(f"host {self.name} did not answer within {timeout_s} s")
            raise self.lost()
        try:
            return task.result()
        except (InfrastructureError, OSError) as error:
            if self.is_dead:
                raise self.lost() from error
            raise

    async def settle(self) -> None:
        """Waits a moment for what was left behind."""
        await self._abandoned.wait(CLEANUP_S)

    def _future(self) -> asyncio.Future[None]:
        if self._death is None:
            self._death = asyncio.get_running_loop().create_future()
        return self._death

    def _abandon(self, task: asyncio.Future[Any], undo: Undo | None) -> None:
        """Leaves a task to end by itself; its late result is undone, its late error was ours already."""
        task.cancel()
        self._abandoned.start(self._undo_late(task, undo))

    async def _undo_late(self, task: asyncio.Future[Any], undo: Undo | None) -> None:
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is None and undo is not None:
            await undo(task.result())

    def _note_undoing_error(self, error: BaseException) -> None:
        self.last_error = f"a late start could not be undone: {error}"


async def kill(sandbox: Sandbox) -> None:
    """Undoes the making of a sandbox."""
    await sandbox.kill()
