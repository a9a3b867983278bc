"""The registry of live sandboxes: ids, time to live, lists, refusals, failed starts, cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from etude.errors import ConfigError, ResourceError, SandboxError
from etude.sandbox.errors import (
    SandboxKilledByAgentError,
    SandboxMissingError,
    SnapshotError,
    TemplateError,
    Unsupported,
)
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import ForkServerBackend, LocalBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Image, Template
from etude.sandbox.types import Network, Resources
from tests.sandbox.scenes import (
    becomes_true,
    below,
    fork_server,
    has_processes,
    in_sandbox,
    on_backend,
    open_descriptors,
    open_local,
    resident_bytes,
    spare_counts,
    unchecked_template,
)

FILES: dict[str, bytes | str] = {"f": "template"}


def test_what_was_asked_for_is_told(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        before_s = time.time()
        one = await backend.create(
            Template(FILES, "name"), Resources(cpus=1.5), timeout_s=100.0, metadata={"k": "v"}
        )
        two = await backend.create()
        info = await one.get_info()
        assert (info.id, info.backend, info.state, info.template) == (one.id, "local", "running", "name")
        assert (info.template_digest, info.parent) == (Template(FILES).digest, None)
        assert (info.resources.cpus, info.network, info.metadata) == (1.5, Network(), {"k": "v"})
        assert before_s <= info.created_s <= time.time()
        assert before_s + 100.0 <= (info.expires_s or 0) <= time.time() + 100.0
        assert (await two.get_info()).expires_s is None
        assert [row.id for row in await backend.list()] == [one.id, two.id]
        assert await backend.connect(one.id) is one
        assert one.id != two.id
        (copy,) = await one.fork()
        assert not isinstance(copy, Exception)
        told = await copy.get_info()
        assert (told.parent, told.metadata, told.template) == (one.id, {"k": "v"}, "name")
        await one.kill()
        assert (await one.get_info()).state == "killed"
        assert [row.id for row in await backend.list()] == [two.id, copy.id]
        with pytest.raises(SandboxMissingError):
            await backend.connect(one.id)

    on_backend(tmp_path, scenario)


def test_time_to_live_ends_a_sandbox_running_or_asleep(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        kept, extended, unlimited, asleep, busy, idle = [await backend.create() for _ in range(6)]
        await idle.commands.run("true")
        await asleep.pause("filesystem")
        waiting = asyncio.create_task(busy.commands.run("sleep 300", 300.0))
        short, shortened = await backend.create(timeout_s=0.3), await backend.create(timeout_s=600.0)
        # No timer rings between two of these: none of them waits for anything.
        for lengthened, timeout_s in ((extended, 600.0), (unlimited, None)):
            await lengthened.set_timeout(0.3)
            await lengthened.set_timeout(timeout_s)
        for brief in (asleep, busy, idle, shortened):
            await brief.set_timeout(0.4)
        with pytest.raises(SandboxKilledByAgentError, match="time to live has expired"):
            await waiting

        async def have_ended() -> bool:
            infos = [await sandbox.get_info() for sandbox in (short, asleep, busy, idle, shortened)]
            return {info.state for info in infos} == {"killed"}

        assert await becomes_true(have_ended)
        assert [row.id for row in await backend.list()] == [kept.id, extended.id, unlimited.id]
        assert await becomes_true(lambda: list((tmp_path / "snapshots").iterdir()) == [])
        with pytest.raises(SandboxKilledByAgentError):  # a later call of an agent that let it pass
            await busy.commands.run("true")
        for ours in (short, asleep, idle):  # no agent had them in its hands
            with pytest.raises(SandboxError, match="killed"):
                await ours.commands.run("true")
        await short.set_timeout(5.0)
        assert (await short.get_info()).expires_s is None

    on_backend(tmp_path, scenario)


def test_what_cannot_be_had_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        image = Template(image=Image("debian", ("0" * 64,)))
        for resources in (
            Resources(memory_bytes=1 << 60), Resources(cpus=10_000), Resources(memory_bytes=0),
            Resources(cpus=-1.0), Resources(disk_bytes=1 << 60),
        ):  # fmt: skip
            with pytest.raises(ResourceError):
                await backend.create(resources=resources)
        with pytest.raises(Unsupported):
            await backend.create(image)
        with pytest.raises(SnapshotError, match="does not exist"):
            await backend.create(snapshot="snap-none")
        with pytest.raises(ConfigError, match="snapshot"):
            await backend.create(Template(FILES), snapshot="snap-none")
        assert backend.launcher_pid is None
        assert await backend.list() == []

    # A context that turns ResourceError into a skip would hide a real one.
    async def run() -> None:
        backend = open_local(tmp_path)
        await scenario(backend)
        await backend.close()

    asyncio.run(run())


def test_an_unisolated_backend_has_no_network_to_give(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        with pytest.raises(Unsupported, match="cannot do this") as raised:
            await backend.create(network=Network(("example.org",)))
        assert raised.value.fix == "use the local backend"

    on_backend(tmp_path, scenario, "unisolated")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "unisolated"])
def test_many_sandboxes_leave_nothing(tmp_path: Path, name: str) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        async def one(number: int) -> None:
            sandbox = await backend.create(Template({"n": str(number % 5)}))
            assert (await sandbox.commands.run("cat n")).stdout == str(number % 5)
            if number % 4 == 0:
                for copy in await sandbox.fork():
                    assert not isinstance(copy, Exception)
                    await copy.kill()
            await sandbox.kill()

        async def many(count: int) -> None:
            for start in range(0, count, 10):
                await asyncio.gather(*(one(start + number) for number in range(10)))

        await many(20)
        server = fork_server(backend)
        assert await has_processes(backend, 0)
        before = open_descriptors(), open_descriptors(server)
        memory_bytes = resident_bytes(server)
        await many(40)
        assert await has_processes(backend, 0)
        assert await becomes_true(
            lambda: open_descriptors() <= before[0] and open_descriptors(server) <= before[1]
        )
        assert resident_bytes(server) - memory_bytes < 4 << 20
        assert await becomes_true(lambda: layers_of(server) == [])
        assert await backend.list() == []

    on_backend(tmp_path, scenario, name)


def layers_of(server: int) -> list[str]:
    """Layers that a fork server holds, as its own root shows them. Needs root."""
    folder = Path(f"/proc/{server}/root/files/layers")
    if os.geteuid() != 0 or not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees into the fork server")
def test_layers_go_when_nobody_stands_on_them(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        server = fork_server(backend)
        (one,) = await sandbox.fork()
        assert not isinstance(one, Exception)
        assert len(layers_of(server)) == 1
        (two,) = await one.fork()
        assert not isinstance(two, Exception)
        assert len(layers_of(server)) == 2
        await one.kill()
        await sandbox.kill()
        assert len(layers_of(server)) == 2, "the last copy stands on both"
        await two.create_snapshot()
        assert await becomes_true(lambda: len(layers_of(server)) == 2)
        await two.pause("filesystem")
        assert await becomes_true(lambda: layers_of(server) == [])
        await two.resume()
        assert await two.files.read("f") == b"template"
        assert len(layers_of(server)) == 3
        await two.kill()
        assert await becomes_true(lambda: layers_of(server) == [])

    on_backend(tmp_path, scenario)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees into the fork server")
@pytest.mark.parametrize("delay_s", [0.0, 0.006, 0.02])
def test_cancelled_starts_leave_nothing(tmp_path: Path, delay_s: float) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        first = await backend.create(Template(FILES))
        await first.commands.run("head -c 30000000 /dev/zero > big")
        server = fork_server(backend)
        assert await has_processes(backend, 1)
        before = open_descriptors()
        tasks: list[asyncio.Task[object]] = [
            asyncio.ensure_future(backend.create(Template({"n": f"{number}"}))) for number in range(4)
        ]
        tasks.append(asyncio.ensure_future(first.fork(3)))
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            for made in result if isinstance(result, list) else [result]:
                if not isinstance(made, BaseException):
                    await made.kill()  # pyright: ignore[reportAttributeAccessIssue]
        assert [row.id for row in await backend.list()] == [first.id]
        assert await has_processes(backend, 1)
        assert await becomes_true(lambda: layers_of(server) == [])
        assert await becomes_true(lambda: open_descriptors() <= before)
        assert (await first.commands.run("echo on")).stdout == "on\n"

    on_backend(tmp_path, scenario)


@pytest.mark.slow
def test_a_start_that_is_cancelled_before_there_is_a_fork_server_leaves_none(tmp_path: Path) -> None:
    async def scenario(delay_s: float) -> None:
        before, known = open_descriptors(), set(below(os.getpid()))
        backend = open_local(tmp_path)
        task = asyncio.create_task(backend.create())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.close()
        assert backend.launcher_pid is None
        assert await becomes_true(lambda: open_descriptors() <= before)
        assert await becomes_true(lambda: set(below(os.getpid())) <= known)

    for delay_s in (0.0, 0.01, 0.05, 0.1):
        asyncio.run(scenario(delay_s))


def test_many_first_sandboxes_share_one_fork_server(tmp_path: Path) -> None:
    known = set(below(os.getpid()))

    async def scenario(backend: ForkServerBackend) -> None:
        tasks = [asyncio.create_task(backend.create(Template(FILES))) for _ in range(6)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["CancelledError", *["MachineSandbox"] * 5]
        assert backend.launcher_pid is not None
        assert backend.launcher_pid in below(os.getpid())
        assert await has_processes(backend, 5)
        assert len(set(below(os.getpid())) - known) == 2 + 5 + spare_counts(backend)[0]

    on_backend(tmp_path, scenario)


def test_a_template_that_could_not_be_stored_does_not_spoil_the_next_use(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        broken = unchecked_template({"x" * 300: b"a name too long for any file system", "a": b"b"})
        for _ in range(2):
            with pytest.raises(SandboxError, match="too long"):
                await backend.create(broken)
        good = await backend.create(Template({"a": "b"}))
        assert await good.files.read("a") == b"b"

    on_backend(tmp_path, scenario)


@pytest.mark.parametrize("num_bytes", [1 << 17, 1 << 19])
def test_an_image_with_more_variables_than_can_be_passed_on_ends_no_other_sandbox(
    tmp_path: Path, num_bytes: int
) -> None:
    (tmp_path / "images" / "layers").mkdir(parents=True)

    async def run() -> None:
        backend = LocalBackend(tmp_path, tmp_path / "images")
        try:
            other = await backend.create(Template(FILES))
            image = Image("long", (), {"LONG": "x" * num_bytes})
            with pytest.raises(TemplateError, match="variables"):
                await backend.create(Template(FILES, "long", image))
            assert await other.files.read("f") == b"template"
            assert [row.id for row in await backend.list()] == [other.id]
        except ResourceError as error:
            pytest.skip(f"no namespaces here: {error}")
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["local", "unisolated"])
def test_after_a_fork_server_died_the_next_sandboxes_get_a_new_one(tmp_path: Path, name: str) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        old = await backend.create(Template(FILES))
        await old.files.write("x", "y")
        snapshot = (await old.create_snapshot()).id
        assert backend.launcher_pid is not None
        for pid in below(backend.launcher_pid)[:1]:
            os.kill(pid, signal.SIGKILL)
        os.kill(backend.launcher_pid, signal.SIGKILL)
        if name == "local":
            with pytest.raises(SandboxError):
                await old.commands.run("sleep 300", 300.0)
        new: Sandbox | None = None
        for _ in range(3):
            try:
                new = await backend.create(Template(FILES))
                break
            except SandboxError:
                continue
        assert new is not None, "the backend does not come back"
        assert await new.files.read("f") == b"template"
        await old.kill()
        again, restored = await backend.create(Template(FILES)), await backend.create(snapshot=snapshot)
        assert (await again.files.read("f"), await restored.files.read("x")) == (b"template", b"y")

    on_backend(tmp_path, scenario, name)


def test_a_closed_backend_starts_nothing_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = open_local(tmp_path)
        sandbox = await backend.create(Template(FILES))
        asleep = await backend.create(Template(FILES))
        await asleep.pause("filesystem")
        await backend.close()
        await backend.close()
        for refused in (
            sandbox.fork,
            sandbox.create_snapshot,
            backend.create,
            lambda: sandbox.files.read("f"),
        ):
            with pytest.raises(SandboxError):
                await refused()
        assert backend.launcher_pid is None
        assert await backend.list() == []

    asyncio.run(scenario())
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_close_that_reports_a_mishap_has_ended_everything_all_the_same(tmp_path: Path) -> None:
    async def mishap() -> None:
        raise SandboxError("what went wrong beside")

    async def scenario() -> None:
        backend = open_local(tmp_path)
        await backend.create(Template(FILES))
        launcher = backend.launcher_pid
        backend.spawn(mishap())
        with pytest.raises(SandboxError, match="beside"):
            await backend.close()
        assert backend.launcher_pid is None
        assert launcher not in below(os.getpid())

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_close_in_the_middle_of_everything_leaves_nothing(tmp_path: Path) -> None:
    known = set(below(os.getpid()))

    async def scenario(delay_s: float) -> None:
        backend = open_local(tmp_path)
        first = await backend.create(Template(FILES))
        tasks: list[asyncio.Task[object]] = [asyncio.ensure_future(backend.create()) for _ in range(3)]
        tasks += [asyncio.ensure_future(first.fork(2)), asyncio.ensure_future(first.commands.run("sleep 9"))]
        tasks.append(asyncio.ensure_future(first.create_snapshot()))
        await asyncio.sleep(delay_s)
        await backend.close()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60.0)
        errors = [result for result in done if isinstance(result, BaseException)]
        assert all(isinstance(error, SandboxError) for error in errors), errors
        assert set(below(os.getpid())) <= known

    for delay_s in (0.0, 0.01, 0.03):
        asyncio.run(scenario(delay_s))
    assert [path.name for path in (tmp_path / "snapshots").iterdir() if path.name.startswith(".")] == []


def test_operations_of_one_sandbox_wait_for_each_other(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        await s.files.write("f", "kept")
        results = await asyncio.gather(
            s.fork(), s.create_snapshot(), s.pause("filesystem"), s.resume(), s.fork(),
            s.files.write("g", "x"), return_exceptions=True,
        )  # fmt: skip
        failed = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(error, SandboxError) for error in failed), failed
        await s.resume()
        assert await s.files.read("f") == b"kept"

    in_sandbox(tmp_path, scenario)


def test_what_is_written_while_a_copy_is_made_is_in_it_whole_or_not_at_all(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        stop = asyncio.Event()

        async def write() -> int:
            number = 0
            while not stop.is_set():
                number += 1
                await s.files.write_many({"a": f"{number}" * 1000, "b": f"{number}" * 1000})
            return number

        writing = asyncio.create_task(write())
        for _ in range(5):
            await asyncio.sleep(0.01)
            (copy,) = await s.fork()
            assert not isinstance(copy, Exception)
            assert await copy.files.read("a") == await copy.files.read("b")
        stop.set()
        assert await writing > 5

    in_sandbox(tmp_path, scenario, {"a": "", "b": ""})


def test_a_fork_server_that_died_is_ours_even_after_the_agent_ran_out_of_memory(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        groups = backend._groups
        if groups is None:
            pytest.skip("no control groups here")
        clone = backend._clones[sandbox.id]
        assert backend.agents_doing(sandbox) is None
        groups.num_killed_for_memory = lambda name: 1  # type: ignore[method-assign]
        assert backend.agents_doing(sandbox) is not None
        os.kill(clone.server.pid, signal.SIGKILL)
        assert await becomes_true(lambda: not clone.server.alive)
        assert backend.agents_doing(sandbox) is None

    on_backend(tmp_path, scenario)


def test_a_kill_that_is_cancelled_halfway_frees_everything_all_the_same(tmp_path: Path) -> None:
    """It is known no more by then: nobody else would delete the snapshot in which it slept."""

    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.pause("filesystem")
        stop, begun, go_on = backend.stop, asyncio.Event(), asyncio.Event()

        async def slow(stopped: MachineSandbox) -> None:
            begun.set()
            await go_on.wait()
            await stop(stopped)

        backend.stop = slow  # type: ignore[method-assign]
        killing = asyncio.ensure_future(sandbox.kill())
        await begun.wait()
        killing.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await killing
        assert list((tmp_path / "snapshots").iterdir()) == []

    on_backend(tmp_path, scenario)


def test_a_sandbox_that_is_killed_just_as_it_wakes_wakes_without_a_mishap(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.pause("filesystem")
        attached, go_on = asyncio.Event(), asyncio.Event()

        async def slow(woken: MachineSandbox) -> None:
            attached.set()
            await go_on.wait()

        backend.connect_network = slow  # type: ignore[method-assign]
        waking = asyncio.ensure_future(sandbox.resume())
        await attached.wait()
        await sandbox.kill()
        go_on.set()
        await waking
        assert (await sandbox.get_info()).state == "killed"

    on_backend(tmp_path, scenario)


def test_a_sandbox_that_cannot_be_ended_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = open_local(tmp_path)
        stuck, asleep = await backend.create(Template(FILES)), await backend.create(Template(FILES))
        await asleep.pause("filesystem")
        stop, delete = backend.stop, backend.delete_snapshot

        async def fails_once(sandbox: MachineSandbox) -> None:
            await stop(sandbox)
            if sandbox is stuck:
                raise SandboxError("it does not end")

        async def slowly(snapshot: str) -> None:
            await asyncio.sleep(0.1)
            await delete(snapshot)

        backend.stop, backend.delete_snapshot = fails_once, slowly  # type: ignore[method-assign]
        with pytest.raises(SandboxError, match="does not end"):
            await backend.close()
        assert list((tmp_path / "snapshots").iterdir()) == []

    asyncio.run(scenario())
