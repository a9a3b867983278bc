"""Migration of a sandbox as a snapshot: exported here, imported and restored on the target.

Intermediate files belong to the process that made them (`kit.leftovers`): those of a killed process are
removed at the next start with its state directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from etude.errors import SandboxError
from etude.kit.leftovers import WORK, sweep, work_directory
from etude.sandbox.errors import SnapshotError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.snapshots import SnapshotStore

SNAPSHOTS, MOVING = "snapshots", "moving"
"""Directories below a state directory."""


def default_state_directory() -> Path:
    """Directory of snapshots, images and layers: `$XDG_STATE_HOME/etude` or `~/.local/state/etude`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "etude"


async def transfer(
    export: Callable[[Path], Awaitable[None]],
    state: Path,
    target: SandboxBackend,
    timeout_s: float | None,
    shares_store: bool = False,
) -> Sandbox:
    """Restores on the target the snapshot that `export` writes, then deletes the target's copy of it.

    `shares_store`: the target is the source and imports the same snapshot, which is therefore kept.
    """
    work = await asyncio.to_thread(work_directory, state / MOVING)
    try:
        file = work.path / "snapshot.tar"
        await export(file)
        imported = await target.import_snapshot(file)
    finally:
        await asyncio.shield(asyncio.to_thread(work.close))

    async def clear() -> None:
        if not shares_store:
            with contextlib.suppress(SnapshotError):
                # It may have expired in transit already, if the sandbox started slowly.
                await target.delete_snapshot(imported.id)

    try:
        moved = await target.create(snapshot=imported.id, timeout_s=timeout_s)
    except BaseException:
        await clear()
        raise
    return await kill_on_failure(moved, clear())


async def kill_on_failure(moved: Sandbox, last: Awaitable[None]) -> Sandbox:
    """Runs the last step of a move and returns the moved sandbox; kills it if the step fails or is cancelled,
    as the caller would not get a handle to it."""
    try:
        await last
    except BaseException:
        await asyncio.shield(moved.kill())
        raise
    return moved


async def replace_source(moved: Sandbox, ending: Coroutine[Any, Any, None]) -> Sandbox:
    """Ends the source of a move by `ending` and returns the moved sandbox; kills that if `ending` fails.

    A cancellation of the caller is ignored meanwhile: the move cannot be undone any more, and must not end
    both sides.
    """
    return await kill_on_failure(moved, _ignore_cancellation(ending))


async def _ignore_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` to its end, and drops a cancellation of the caller meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    task.result()


def clear_litter(state: Path) -> None:
    """Removes files of moves and forks that killed processes left below a state directory. Blocks."""
    SnapshotStore(state / SNAPSHOTS).sweep()
    sweep(state / MOVING, WORK)


async def gather_copies(starting: Sequence[Awaitable[Sandbox]]) -> list[Sandbox | SandboxError]:
    """Each copy, or the SandboxError that prevented it; other errors are raised.

    Then, and if the caller is cancelled, the started copies are killed, as nobody gets handles to them.
    """
    tasks = [asyncio.ensure_future(copy) for copy in starting]
    try:
        copies = await asyncio.gather(*tasks, return_exceptions=True)
        result: list[Sandbox | SandboxError] = []
        for copy in copies:
            if isinstance(copy, BaseException) and not isinstance(copy, SandboxError):
                raise copy
            result.append(copy)
    except BaseException:
        started = [
            task.result() for task in tasks if task.done() and not task.cancelled() and not task.exception()
        ]
        await asyncio.shield(asyncio.gather(*(copy.kill() for copy in started)))
        raise
    return result
