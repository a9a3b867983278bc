"""The microVM backend against the fake: the contract, diffs, page faults, faults, and what is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest

from etude.errors import ResourceError, SandboxError
from etude.sandbox.errors import SnapshotError, TemplateError, Unsupported
from etude.sandbox.firecracker.api import FirecrackerApi, FirecrackerError
from etude.sandbox.firecracker.backend import FirecrackerBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Network
from tests.sandbox.docker import contract
from tests.sandbox.docker.contract import FILES, needs_namespaces
from tests.sandbox.firecracker.builders import SMALL, all_processes_end, make_setup, needs_userfaultfd, play

pytestmark = needs_namespaces


def test_the_contract_holds(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        await contract.files_behave(s, tmp_path)
        await contract.commands_behave(s)
        await contract.sessions_behave(s)
        await contract.tests_run(s)

    play(tmp_path, scenario)


@pytest.mark.slow
def test_sleeping_three_times_loses_nothing(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        await contract.three_sleeps_lose_nothing(await backend.create(Template(FILES), SMALL), "full")

    play(tmp_path, scenario, make_setup(tmp_path, jailed=os.geteuid() == 0))


@needs_userfaultfd
def test_a_guest_wakes_page_by_page(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        await contract.three_sleeps_lose_nothing(s, "full")

    play(tmp_path, scenario, make_setup(tmp_path, "Uffd"))


@pytest.mark.slow
@needs_userfaultfd
def test_a_page_fault_handler_that_dies_costs_its_guest_only(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        (copy,) = await s.fork(1)
        assert not isinstance(copy, SandboxError)
        handler = backend._machines[copy.id]._handler
        assert handler is not None
        handler._process.terminate()
        async with asyncio.timeout(60.0):
            await handler.wait()
            while (await copy.get_info()).state != "lost":  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.02)
        assert (await s.commands.run("echo on")).stdout == "on\n"

    play(tmp_path, scenario, make_setup(tmp_path, "Uffd"))


@pytest.mark.slow
def test_copies_are_apart(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        await contract.copies_are_apart(await backend.create(Template(FILES), SMALL))
        assert await backend.list_snapshots() == []

    play(tmp_path, scenario)


def test_later_snapshots_are_diffs_and_stand_alone(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        kinds: list[str] = []
        api = backend._machines[s.id].api
        create = api.create_snapshot

        async def watched(kind: str, state: str, memory: str) -> None:
            kinds.append(kind)
            await create(kind, state, memory)  # type: ignore[arg-type]

        api.create_snapshot = watched  # type: ignore[method-assign]
        infos = []
        for number in range(3):
            await s.files.write(f"at{number}", str(number) * 9000)
            infos.append(await s.create_snapshot())
        assert kinds == ["Full", "Diff", "Diff"]
        await backend.delete_snapshot(infos[0].id)
        await s.kill()
        for number, info in enumerate(infos[1:], 1):
            copy = await backend.create(snapshot=info.id)
            assert sorted(await copy.diff()) == [f"at{past}" for past in range(number + 1)]
            await copy.kill()

    play(tmp_path, scenario)


def test_a_command_goes_on_across_a_snapshot(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        session = await s.create_session()
        running = asyncio.create_task(s.commands.run("sleep 0.6; echo done"))
        await asyncio.sleep(0.1)
        await s.create_snapshot()
        assert (await running).stdout == "done\n"
        assert (await s.run_in_session(session, "echo too")).stdout == "too\n"

    play(tmp_path, scenario)


@pytest.mark.slow
def test_a_snapshot_that_fails_leaves_the_guest_running(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        await s.create_snapshot()
        api = backend._machines[s.id].api
        create = api.create_snapshot

        async def full_disk(kind: str, state: str, memory: str) -> None:
            await create(kind, state, memory)  # type: ignore[arg-type]
            raise FirecrackerError("No space left on device", field="firecracker", status=400)

        api.create_snapshot = full_disk  # type: ignore[method-assign]
        with pytest.raises(SandboxError, match="No space left"):
            await s.pause("full")
        api.create_snapshot = create  # type: ignore[method-assign]
        assert (await s.get_info()).state == "running"
        await s.files.write("after", "x" * 9000)
        info = await s.create_snapshot()
        copy = await backend.create(snapshot=info.id)
        assert sorted(await copy.diff()) == ["after"]

    play(tmp_path, scenario)


def test_a_hypervisor_that_dies_is_lost(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        begun = asyncio.Event()
        command = s.commands.run("echo on; sleep 30", on_output=lambda *_: begun.set())
        running = asyncio.create_task(command)
        await asyncio.wait_for(begun.wait(), 60.0)
        process = backend._machines[s.id]._process
        assert process is not None
        process._process.send_signal(signal.SIGTERM)
        with pytest.raises(SandboxError):
            await running
        assert (await s.get_info()).state == "lost"
        await s.kill()

    play(tmp_path, scenario)


def test_a_torn_snapshot_is_refused(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        info = await s.create_snapshot()
        memory = backend.snapshots.root / info.id / "memory"
        memory.chmod(0o600)
        with memory.open("r+b") as file:
            file.write(b"\xff")
        with pytest.raises(SnapshotError):
            await backend.create(snapshot=info.id)

    play(tmp_path, scenario)


def test_another_guest_image_or_release_is_refused(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        info = await s.create_snapshot()
        (tmp_path / "vmlinux").write_bytes(b"another kernel")
        other = FirecrackerBackend(backend.setup, tmp_path / "state")
        with pytest.raises(SnapshotError, match="another kernel"):
            await other.create(snapshot=info.id)
        await other.close()
        (tmp_path / "vmlinux").write_bytes(b"kernel")
        program = backend.setup.firecracker
        program.write_text(
            program.read_text().replace(
                "main(sys", "import etude.sandbox.firecracker.fake as f\nf.VERSION = '1.14.0'\nmain(sys"
            )
        )
        other = FirecrackerBackend(backend.setup, tmp_path / "state")
        with pytest.raises(SnapshotError):
            await other.create(snapshot=info.id)
        await other.close()

    play(tmp_path, scenario)


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        with pytest.raises(SandboxError, match="exit code 7"):
            await backend.create(Template(FILES), SMALL)
        assert await backend.list() == []

    play(tmp_path, scenario, make_setup(tmp_path, format_disk=("/bin/sh", "-c", "exit 7")))


@pytest.mark.parametrize("after_s", [0.05, 0.3])
def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        task = asyncio.create_task(backend.create(Template(FILES), SMALL))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await backend.list() == []
        await all_processes_end(str(tmp_path))

    setup = make_setup(tmp_path)
    # A guest that never answers: the start is under way whenever it is cancelled.
    play(tmp_path, scenario, dataclasses.replace(setup, boot_args="-- vsock:99 --line stdio"))


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        with pytest.raises(Unsupported, match="local"):
            await s.pause("filesystem")
        with pytest.raises(Unsupported, match="vm"):
            await s.migrate(backend)
        assert not Network().allow

    play(tmp_path, scenario)


def test_missing_programs_and_images_are_named(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    gone = dataclasses.replace(setup, rootfs=tmp_path / "none")
    with pytest.raises(TemplateError, match="no such guest image"):
        play(tmp_path, lambda backend: _create(backend), gone)
    gone = dataclasses.replace(setup, firecracker=tmp_path / "firecracker-none")
    with pytest.raises(ResourceError, match="does not run"):
        play(tmp_path, lambda backend: _create(backend), gone)
    assert any("firecracker-none" in line for line in FirecrackerBackend(gone, tmp_path / "state").doctor())


async def _create(backend: FirecrackerBackend) -> None:
    await backend.create(Template(FILES), SMALL)


def test_the_api_s_order_is_kept(tmp_path: Path) -> None:
    """Of the fake, so that the adapter is held to the real rules."""

    async def scenario(backend: FirecrackerBackend) -> None:
        s = await backend.create(Template(FILES), SMALL)
        api: FirecrackerApi = backend._machines[s.id].api
        assert (await api.describe())["state"] == "Running" and await api.version() == "1.13.1"
        for call, said in (
            (api.create_snapshot("Full", "a", "b"), "while running"),
            (api.put_machine(1, 128, True), "after starting"),
            (api.start(), "after starting"),
            (api.load_snapshot("a", "File", "b", resume=True, track_dirty_pages=True), "not allowed after"),
            (api._change("PUT", "/entropy", {"nonsense": 1}), "unknown field"),
            (api._change("PUT", "/nonsense", {}), "Invalid request method and/or path"),
        ):
            with pytest.raises(FirecrackerError, match=said) as caught:
                await call
            assert caught.value.status == 400

    play(tmp_path, scenario)


def test_a_kill_that_is_cancelled_halfway_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        sandbox = await backend.create(Template(FILES), SMALL)
        killing = asyncio.ensure_future(sandbox.kill())
        await asyncio.sleep(0)
        killing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killing
        assert backend._work is not None
        assert [path.name for path in backend._work.path.glob("*/*")] == []

    play(tmp_path, scenario)


def test_a_backend_that_is_closed_while_a_sandbox_is_asked_for_says_so(tmp_path: Path) -> None:
    async def scenario(backend: FirecrackerBackend) -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            asked.set()
            await go_on.wait()

        backend._clear_litter = slow  # type: ignore[method-assign]
        creating = asyncio.ensure_future(backend.create(Template(FILES), SMALL))
        await asked.wait()
        await backend.close()
        go_on.set()
        with pytest.raises(SandboxError, match="the backend is closed"):
            await creating
        assert await backend.list() == []

    play(tmp_path, scenario)


def test_a_close_that_reports_a_mishap_leaves_no_directory(tmp_path: Path) -> None:
    async def mishap() -> None:
        raise SandboxError("what went wrong beside")

    async def scenario(backend: FirecrackerBackend) -> None:
        await backend.create(Template(FILES), SMALL)
        backend.spawn(mishap())
        with pytest.raises(SandboxError, match="beside"):
            await backend.close()
        assert list((tmp_path / "state/firecracker").iterdir()) == []

    play(tmp_path, scenario)
