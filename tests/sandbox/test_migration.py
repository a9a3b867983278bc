"""Interrupted migrations: a killed participant leaves nothing that survives the next start."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.kit.durable import DRAFTS
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import ForkServerBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.migration import MOVING, SNAPSHOTS, clear_litter
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.scenes import becomes_true, on_backend, open_local

ROOT = Path(__file__).parents[2]
CHILD = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.template import Template
from tests.sandbox.scenes import open_local

async def stop_here(*given, **named):
    print("there", flush=True)
    await asyncio.sleep(60)

class Stuck:
    "A target at which a move stops: before or after the copy was taken in."

    def __init__(self, inner, stage):
        self.hello = inner.hello
        self.import_snapshot = stop_here if stage == "import" else inner.import_snapshot
        self.create = stop_here

async def main(stage, here, there):
    backend = open_local(Path(here))
    sandbox = await backend.create(Template({"f": "x"}))
    if stage == "fork":
        backend.restore = stop_here
        await MachineBackend.fork(backend, sandbox, 1)
    await sandbox.migrate(Stuck(open_local(Path(there)), stage))

asyncio.run(main(*sys.argv[1:]))
"""


def entries(state: Path) -> list[str]:
    """What lies in a state directory, but for empty directories that are always there."""
    found = [path.relative_to(state).as_posix() for path in state.rglob("*")]
    return sorted(path for path in found if path not in (SNAPSHOTS, MOVING))


def kill_in(stage: str, here: Path, there: Path) -> None:
    """A process that moves (or forks) a sandbox, killed in the middle."""
    command = [sys.executable, "-c", CHILD, stage, str(here), str(there)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            said = child.stdout.readline()
        finally:
            child.kill()
        assert said == "there\n"
    assert child.returncode == -signal.SIGKILL


@contextmanager
def hanging_deletion(backend: ForkServerBackend) -> Iterator[asyncio.Event]:
    """Snapshots are deleted only once the block has ended. Yields what is set when one is to be."""
    begun, go_on, delete = asyncio.Event(), asyncio.Event(), backend.delete_snapshot

    async def hang(snapshot: str) -> None:
        begun.set()
        await go_on.wait()
        await delete(snapshot)

    backend.delete_snapshot = hang  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        backend.delete_snapshot = delete  # type: ignore[method-assign]
        go_on.set()


async def only_make_one(backend: ForkServerBackend) -> None:
    sandbox = await backend.create(Template({"f": "x"}))
    await sandbox.kill()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["import", "create", "fork"])
def test_a_process_killed_in_a_move_leaves_nothing_to_the_next_start(tmp_path: Path, stage: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"

    async def scenario(backend: ForkServerBackend) -> None:
        kill_in(stage, here, there)
        left = entries(here)
        assert any(path.startswith(f"{SNAPSHOTS}/{DRAFTS}") for path in left), left
        if stage == "import":
            assert any(path.startswith(f"{MOVING}/") for path in left), left
        assert await backend.list_snapshots() == []
        await only_make_one(backend)
        assert entries(here) == []
        if stage == "create":
            assert any(path.startswith(f"{SNAPSHOTS}/{DRAFTS}") for path in entries(there))
            clear_litter(there)
        assert not there.exists() or entries(there) == []

    on_backend(here, scenario)


def test_clearing_spares_what_is_durable_and_what_lives(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template({"f": "x"}))
        kept = await sandbox.create_snapshot()
        asleep = await backend.create(Template({"f": "y"}))
        await asleep.pause("filesystem")
        clear_litter(tmp_path)
        await asleep.resume()
        assert await asleep.files.read("f") == b"y"
        assert [info.id for info in await backend.list_snapshots()] == [kept.id]

    on_backend(tmp_path, scenario)


def test_a_copy_that_nobody_fetched_goes_when_its_time_is_over_or_the_backend_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"

    async def send(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template({"f": "x"}))
        info = await backend._save(sandbox, "filesystem", None, temporary=True)
        await backend.export_snapshot(info.id, file)
        await backend.delete_snapshot(info.id)

    async def receive() -> None:
        there = open_local(tmp_path / "there")
        await there.import_snapshot(file)
        assert entries(tmp_path / "there") != []
        assert await there.list_snapshots() == []
        await there.close()
        assert entries(tmp_path / "there") == []
        monkeypatch.setattr("etude.sandbox.snapshot_keeper.TRANSIT_S", 0.3)
        there = open_local(tmp_path / "there")
        await there.import_snapshot(file)
        assert await becomes_true(lambda: entries(tmp_path / "there") == [])
        await there.close()

    on_backend(tmp_path / "here", send)
    asyncio.run(receive())


def test_a_move_leaves_nothing_on_either_side(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        there = open_local(tmp_path / "there")
        sandbox: Sandbox = await backend.create(Template({"f": "x"}))
        moved = await sandbox.migrate(there)
        assert await moved.files.read("f") == b"x"
        assert entries(tmp_path / "here") == entries(tmp_path / "there") == []
        await there.close()

    on_backend(tmp_path / "here", scenario)


def test_a_move_that_is_cancelled_while_its_copy_in_transit_is_deleted_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        there = open_local(tmp_path / "there")
        sandbox = await backend.create(Template({"f": "x"}))
        with hanging_deletion(there) as begun:
            moving = asyncio.ensure_future(sandbox.migrate(there))
            await begun.wait()
            moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert await there.list() == []
        assert await sandbox.files.read("f") == b"x"
        await there.close()

    on_backend(tmp_path / "here", scenario)


def test_a_move_that_is_cancelled_while_its_source_is_ended_has_happened(tmp_path: Path) -> None:
    """There is no way back by then: to give up the sandbox over there would end both."""

    async def scenario(backend: ForkServerBackend) -> None:
        there = open_local(tmp_path / "there")
        sandbox = await backend.create(Template({"f": "x"}))
        with hanging_deletion(backend) as begun:
            moving = asyncio.ensure_future(sandbox.migrate(there))
            await begun.wait()
            moving.cancel()
            await asyncio.sleep(0)
        moved = await moving
        assert await moved.files.read("f") == b"x"
        assert [info.id for info in await there.list()] == [moved.id]
        assert await backend.list() == []
        await there.close()
        assert entries(tmp_path / "here") == entries(tmp_path / "there") == []

    on_backend(tmp_path / "here", scenario)


def test_a_sandbox_that_is_killed_while_it_falls_asleep_for_a_move_says_so(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        there = open_local(tmp_path / "there")
        sandbox = await backend.create(Template({"f": "x"}))
        stop, begun, go_on = backend.stop, asyncio.Event(), asyncio.Event()

        async def slow_at_first(stopped: MachineSandbox) -> None:
            if not begun.is_set():
                begun.set()
                await go_on.wait()
            await stop(stopped)

        backend.stop = slow_at_first  # type: ignore[method-assign]
        moving = asyncio.ensure_future(sandbox.migrate(there))
        await begun.wait()
        await sandbox.kill()
        go_on.set()
        with pytest.raises(SandboxError, match="killed"):
            await moving
        assert await there.list() == await backend.list() == []
        await there.close()

    on_backend(tmp_path / "here", scenario)


def test_a_memory_sandbox_says_that_it_moves_to_its_own_kind_only(tmp_path: Path) -> None:
    from etude.sandbox.errors import Unsupported

    async def scenario() -> None:
        sandbox = await MemoryBackend().create(Template({"f": "x"}))
        with pytest.raises(Unsupported, match="from memory to memory, not to local"):
            await sandbox.migrate(open_local(tmp_path))
        assert await sandbox.files.read("f") == b"x"

    asyncio.run(scenario())
