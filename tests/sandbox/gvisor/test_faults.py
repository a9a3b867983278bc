"""A runsc that fails at any step leaves nothing behind and never passes for success."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from etude.errors import ResourceError, SandboxError
from etude.sandbox.gvisor.backend import GvisorBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Template
from tests.fakes.runsc import install_fake
from tests.sandbox.gvisor.gvisors import HastyAtCheckpoint, HastyAtStart, needs_namespaces, with_gvisor
from tests.sandbox.scenes import becomes_true

pytestmark = needs_namespaces
FILES: dict[str, bytes | str] = {"a.txt": "alpha"}


async def made(backend: GvisorBackend) -> MachineSandbox:
    return await backend.create(Template(FILES))


def container_pid(backend: GvisorBackend, sandbox: MachineSandbox) -> int:
    (path,) = (backend.state / "gvisor").glob(f"*/{sandbox.id}-*/pid")
    return int(path.read_text())


def nothing_runs(backend: GvisorBackend) -> bool:
    return not list((backend.state / "gvisor").glob("*/gvisor-*"))


@pytest.mark.slow
def test_the_fake_starts_saves_and_restores() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        source = await made(backend)
        await source.files.write("b.txt", "beta")
        snapshot = await source.create_snapshot()
        await source.files.write("b.txt", "later")
        copy = await backend.create(snapshot=snapshot.id)
        assert await copy.files.read("b.txt") == b"beta"
        assert await source.files.read("b.txt") == b"later"

    with_gvisor(scenario, fault="")


def test_a_run_that_fails_is_told_in_runscs_words() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        with pytest.raises(SandboxError, match="run: made to fail"):
            await made(backend)
        assert nothing_runs(backend)
        assert await backend.list() == []

    with_gvisor(scenario, fault="run")


def test_a_container_that_says_nothing_is_given_up() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        with pytest.raises(SandboxError, match="no answer within"):
            await made(backend)
        assert nothing_runs(backend)

    with_gvisor(scenario, "mute", HastyAtStart)


def test_a_cancelled_start_leaves_nothing() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        for delay_s in (0.0, 0.01, 0.1):
            task = asyncio.create_task(made(backend))
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert nothing_runs(backend)

    with_gvisor(scenario, fault="mute")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("checkpoint", "checkpoint: made to fail"),
        ("partial", "incomplete checkpoint"),
        ("hang", "did not end within"),
    ],
)
def test_a_failed_checkpoint_is_no_snapshot_and_the_sandbox_goes_on(fault: str, message: str) -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandbox = await made(backend)
        for attempt in (sandbox.create_snapshot, sandbox.pause):
            with pytest.raises(SandboxError, match=message):
                await attempt()
            assert await sandbox.files.read("a.txt") == b"alpha"
        assert (await sandbox.get_info()).state == "running"
        with pytest.raises(SandboxError, match=message):
            await sandbox.fork(2)
        assert await backend.list_snapshots() == []
        assert list((backend.state / "snapshots").iterdir()) == []

    with_gvisor(scenario, fault, HastyAtCheckpoint if fault == "hang" else GvisorBackend)


def test_a_container_that_dies_of_its_checkpoint_is_lost() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandbox = await made(backend)
        with pytest.raises(SandboxError):
            await sandbox.pause()
        with pytest.raises(SandboxError):
            await sandbox.files.read("a.txt")
        assert await becomes_true(lambda: sandbox.state == "lost", 60.0)
        assert await backend.list_snapshots() == []
        await sandbox.kill()
        assert nothing_runs(backend)

    with_gvisor(scenario, fault="die")


@pytest.mark.slow
def test_a_failed_restore_leaves_the_sandbox_asleep_and_copies_fail_one_by_one() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandbox = await made(backend)
        copies = await sandbox.fork(2)
        assert all(isinstance(copy, SandboxError) for copy in copies)
        assert await sandbox.files.read("a.txt") == b"alpha"
        await sandbox.pause()
        for _ in range(2):
            with pytest.raises(SandboxError, match="restore: made to fail"):
                await sandbox.resume()
            assert (await sandbox.get_info()).state == "paused"
        assert nothing_runs(backend)

    with_gvisor(scenario, fault="restore")


@pytest.mark.slow
def test_a_torn_checkpoint_is_refused() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandbox = await made(backend)
        snapshot = await sandbox.create_snapshot()
        pages = backend.snapshots.root / snapshot.id / "pages.img"
        whole = pages.read_bytes()
        for damaged in (whole[:-1], whole[:-1] + b"x", b""):
            pages.write_bytes(damaged)
            with pytest.raises(SandboxError, match=r"torn|damaged"):
                await backend.create(snapshot=snapshot.id)
        pages.unlink()
        with pytest.raises(SandboxError):
            await backend.create(snapshot=snapshot.id)
        pages.write_bytes(whole)
        assert await (await backend.create(snapshot=snapshot.id)).files.read("a.txt") == b"alpha"

    with_gvisor(scenario, fault="")


@pytest.mark.slow
def test_a_snapshot_of_another_runsc_is_refused() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        snapshot = await (await made(backend)).create_snapshot()
        other = GvisorBackend(backend.state, str(install_fake(backend.state / "other", "other")))
        with pytest.raises(SandboxError, match=r"release-20990101\.0.*release-20990202\.0"):
            await other.create(snapshot=snapshot.id)
        await other.close()

    with_gvisor(scenario, fault="")


def test_a_killed_container_is_lost_and_its_directory_goes_with_it() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandbox, other = await made(backend), await made(backend)
        os.kill(container_pid(backend, sandbox), signal.SIGKILL)
        with pytest.raises(SandboxError):
            await sandbox.files.read("a.txt")
        assert await becomes_true(lambda: sandbox.state == "lost", 60.0)
        assert await other.files.read("a.txt") == b"alpha"
        await sandbox.kill()
        assert len(list((backend.state / "gvisor").glob("*/gvisor-*"))) == 1

    with_gvisor(scenario, fault="")


def test_an_old_runsc_is_refused_before_anything_is_made() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        with pytest.raises(ResourceError, match="older"):
            await made(backend)
        assert not backend.state.exists()

    with_gvisor(scenario, fault="old")


def test_a_closed_backend_makes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = GvisorBackend(tmp_path / "state")
        await backend.close()
        with pytest.raises(SandboxError, match="closed"):
            await made(backend)
        assert not backend.state.exists()

    asyncio.run(scenario())


def test_a_kill_that_is_cancelled_halfway_leaves_nothing() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandbox = await made(backend)
        killing = asyncio.ensure_future(sandbox.kill())
        await asyncio.sleep(0)
        killing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killing
        assert nothing_runs(backend)

    with_gvisor(scenario, fault="")
