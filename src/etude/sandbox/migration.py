"""A sandbox on its way as a snapshot: exported here, taken in there, made a sandbox again.

What lies between the steps belongs to the process that made it (`kit.leftovers`): one that is killed
leaves it to the next start of its state directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from etude.errors import SandboxError
from etude.kit.leftovers import sweep_work, work_directory
from etude.sandbox.errors import SnapshotError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.snapshots import SnapshotStore

SNAPSHOTS, MOVING = "snapshots", "moving"
"""Directories below a state directory."""


def default_state_directory() -> Path:
    """Where snapshots, images and layers live: `$XDG_STATE_HOME/etude` or `~/.local/state/etude`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "etude"


async def transfer(
    export: Callable[[Path], Awaitable[None]],
    state: Path,
    target: SandboxBackend,
    timeout_s: float | None,
    shares_store: bool = False,
) -> Sandbox:
    """A sandbox over there that continues what `export` writes to a file; the copy over there goes again.

    `shares_store`: the target is the source, and has the very snapshot that is exported: it stays.
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
                # Its time in transit was over before the sandbox began: it has gone by itself.
                await target.delete_snapshot(imported.id)

    try:
        moved = await target.create(snapshot=imported.id, timeout_s=timeout_s)
    except BaseException:
        await clear()
        raise
    return await or_killed(moved, clear())


async def or_killed(moved: Sandbox, last: Awaitable[None]) -> Sandbox:
    """A sandbox that has moved, after a last step of its move. If that fails or is cancelled the sandbox is
    killed: nobody would ever know of it."""
    try:
        await last
    except BaseException:
        await asyncio.shield(moved.kill())
        raise
    return moved


async def in_place_of(moved: Sandbox, ending: Coroutine[Any, Any, None]) -> Sandbox:
    """A sandbox that has moved, once its source, which `ending` ends, has gone. If that fails it is killed.

    A caller that is cancelled meanwhile gets it all the same: there is no way back any more, and a move that
    has happened is not to end both sides.
    """
    return await or_killed(moved, past_cancelling(ending))


async def past_cancelling(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work` to its end, also in a task that is cancelled, which hears nothing of it."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    task.result()


def clear_litter(state: Path) -> None:
    """Removes what killed processes left of moves and forks below a state directory. Blocks."""
    SnapshotStore(state / SNAPSHOTS).sweep()
    sweep_work(state / MOVING)


async def gather_copies(starting: Sequence[Awaitable[Sandbox]]) -> list[Sandbox | SandboxError]:
    """Each copy, or the error that prevented it; anything but a SandboxError is raised.

    Then, and when the caller is cancelled, the copies that did start are killed: nobody would ever know.
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
