"""The snapshots of a machine backend: durable ones, and temporary ones that are removed with this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from etude.kit.tasks import Tasks
from etude.sandbox.errors import SnapshotError, Unsupported
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.migration import SNAPSHOTS, clear_litter, default_state_directory
from etude.sandbox.refusals import unsupported
from etude.sandbox.snapshots import Snapshot, SnapshotDraft, SnapshotStore
from etude.sandbox.types import SnapshotInfo, SnapshotKind

TRANSIT_S = 300.0
"""Lifetime of an imported temporary snapshot: its sender creates a sandbox from it at once, or is dead."""


class SnapshotKeeper:
    """The part of a backend that writes, lists, transfers and deletes snapshots. For one event loop."""

    name = "machine"
    version = "1"
    """Version of everything that a snapshot of this kind depends on."""

    def __init__(self, state: Path | None = None) -> None:
        """`state`: directory of snapshots, logs and working files, made when first needed."""
        self.state = state or default_state_directory()
        self.snapshots = SnapshotStore(self.state / SNAPSHOTS)
        self._asleep: dict[str, str] = {}
        """Id of each paused sandbox -> the snapshot that holds its state."""
        self._in_transit: dict[str, asyncio.TimerHandle] = {}
        """Imported temporary snapshots from which sandboxes will be created -> timer of their expiry."""
        self._background_errors: list[BaseException] = []
        self._background = Tasks(on_error=self._background_errors.append)
        self._clearing: asyncio.Future[None] | None = None

    # For each kind of machine

    async def save(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        """Writes the running machine's state into the draft; the machine runs on afterwards."""
        raise self.unsupported(kind)

    async def discard(self, draft: SnapshotDraft) -> None:
        """Removes a draft that `save` did not finish, or that could not be published."""
        self.snapshots.discard(draft)

    def unsupported(self, ability: str) -> Unsupported:
        """The error for a capability that this kind of machine lacks."""
        return unsupported(self.name, ability)

    # SandboxBackend

    async def list_snapshots(self) -> list[SnapshotInfo]:
        asleep = set(self._asleep.values())
        return [info for info in self.snapshots.list(self.name) if info.id not in asleep]

    async def delete_snapshot(self, snapshot: str) -> None:
        timer = self._in_transit.pop(snapshot, None)
        if timer is not None:
            timer.cancel()
        await asyncio.to_thread(self.snapshots.delete, snapshot)

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        await self.snapshots.export(snapshot, target)

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        known = self._in_transit
        info = await self.snapshots.import_(source, self.name)
        if info.id not in known and self.snapshots.is_in_transit(info.id):
            loop = asyncio.get_running_loop()
            known[info.id] = loop.call_later(TRANSIT_S, lambda: self.spawn(self._delete_unclaimed(info.id)))
        return info

    # Inner workings

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work in the background; `close` waits for it and raises its errors."""
        self._background.start(work)

    async def _clear_litter(self) -> None:
        """Once per process, removes leftovers of moves and forks of killed processes."""
        if self._clearing is None:
            self._clearing = asyncio.ensure_future(asyncio.to_thread(clear_litter, self.state))
        await asyncio.shield(self._clearing)

    async def _delete_unclaimed(self, snapshot: str) -> None:
        """Deletes an imported temporary snapshot, if it still exists."""
        if snapshot in self._in_transit:
            with contextlib.suppress(SnapshotError):
                # Its sender may delete it at the same time.
                await self.delete_snapshot(snapshot)

    async def _save(
        self, sandbox: MachineSandbox, kind: SnapshotKind, name: str | None, temporary: bool = False
    ) -> SnapshotInfo:
        """Makes a snapshot, under the sandbox's lock; a temporary one is removed with this process."""
        draft = self.snapshots.draft(sandbox.id)
        try:
            await self._write_state(sandbox, kind, draft)
            return await self.snapshots.publish(
                draft,
                kind=kind,
                name=name,
                backend=self.name,
                backend_version=self.version,
                sandbox_id=sandbox.id,
                spec=sandbox.spec,
                temporary=temporary,
            )
        except BaseException:
            await self.discard(draft)
            raise

    async def _write_state(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        try:
            await self.save(sandbox, kind, draft)
        except OSError as error:
            raise SnapshotError(
                f"the snapshot could not be written: {error}",
                field="snapshot",
                received=draft.id,
                fix="free disk space, or choose another state directory",
            ) from error

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        snapshot.check_origin(self.name, self.version, memory=snapshot.info.kind == "full")
