"""Copies of a sandbox: forked, paused and resumed, migrated. What is copied and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.errors import SandboxError, ToolArgumentError
from etude.sandbox.errors import SandboxMissingError, SandboxStateError, SnapshotError, Unsupported
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import MAX_LAYERS, ForkServerBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.machine_backend import MachineBackend, gather_copies
from etude.sandbox.snapshots import Spec
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.scenes import (
    becomes_true,
    copies,
    has_processes,
    in_sandbox,
    on_backend,
    open_local,
)

FILES: dict[str, bytes | str] = {
    "keep": "template", "change": "template", "remove": "template", "d/one": "1", "d/two": "2",
    "whole/x": "x", "moved/y": "y",
}  # fmt: skip
WORK = """
echo changed > change; rm remove; rm d/one; echo 3 > d/three
rm -r whole; mkdir whole; echo new > whole/z
mv moved renamed; mkdir moved; echo own > moved/own
mkdir -p deep/er; echo x > deep/er/f; chmod 700 deep; chmod 741 keep
echo hard > a; ln a b; ln -s nowhere dangling; ln -s d link; ln -s /tmp/t out; mkfifo fifo
echo t > /tmp/t; mkdir /tmp/td; mkfifo /tmp/tf; touch -d '2001-02-03 04:05:06.789012345' old
touch -d @99 deep
head -c 3000000 /dev/urandom > big; printf 'x' > "$(printf 'odd\\nname\\377')"; : > .wh.odd
"""
SHOW = """
import hashlib, os, stat
for top in ("/workspace", "/tmp"):
    inodes = {}
    for folder, names, files in sorted(os.walk(top)):
        for name in sorted(names + files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            row = [path.encode(errors="surrogateescape"), oct(status.st_mode)]
            if stat.S_ISREG(status.st_mode):
                first = inodes.setdefault((status.st_dev, status.st_ino), path)
                row += [hashlib.md5(open(path, "rb").read()).hexdigest(), first]
            if stat.S_ISLNK(status.st_mode):
                row.append(os.readlink(path))
            if not stat.S_ISFIFO(status.st_mode):
                row.append(status.st_mtime_ns)
            print(row)
"""


async def state_of(sandbox: Sandbox) -> str:
    shown = await sandbox.commands.run("python3 -", limit_bytes=1 << 20, stdin=SHOW)
    assert (shown.exit_code, shown.stderr, shown.truncated) == (0, "", False)
    return shown.stdout


async def counts_on(sandbox: Sandbox) -> None:
    """Waits until the sandbox's counter has moved; it is read between its being emptied and written, too."""
    before = await sandbox.files.read("n")

    async def has_moved() -> bool:
        return await sandbox.files.read("n") not in (b"", before)

    assert await becomes_true(has_moved), "the sandbox's processes stand still"


async def snapshot_and_create(sandbox: Sandbox, backend: ForkServerBackend) -> Sandbox:
    info = await sandbox.create_snapshot()
    return await backend.create(snapshot=info.id)


async def fork_one(sandbox: Sandbox, backend: ForkServerBackend) -> Sandbox:
    return (await copies(sandbox))[0]


async def pause_and_resume(sandbox: Sandbox, backend: ForkServerBackend) -> Sandbox:
    await sandbox.pause("filesystem")
    await sandbox.resume()
    return sandbox


async def migrate_home(sandbox: Sandbox, backend: ForkServerBackend) -> Sandbox:
    return await sandbox.migrate(backend)


Way = Callable[[Sandbox, ForkServerBackend], Awaitable[Sandbox]]
ways = pytest.mark.parametrize(
    "way", [fork_one, snapshot_and_create, pause_and_resume, migrate_home], ids=lambda way: way.__name__
)


@ways
def test_everything_in_the_files_comes_along(tmp_path: Path, way: Way) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        assert (await sandbox.commands.run(WORK)).stderr == ""
        before, changes = await state_of(sandbox), await sandbox.diff()
        copy = await way(sandbox, backend)
        assert await state_of(copy) == before
        assert await copy.diff() == changes
        # Once more: now over a saved layer, and with changes to what it holds.
        again = "echo more >> change; rm -r renamed deep; mkdir deep; echo n > deep/n"
        again += "; rm -r /tmp/td; echo u > /tmp/t"
        await copy.commands.run(again)
        before, changes = await state_of(copy), await copy.diff()
        last = await way(copy, backend)
        assert await state_of(last) == before
        assert await last.diff() == changes

    on_backend(tmp_path, scenario)


@pytest.mark.slow
@ways
def test_an_unisolated_sandbox_keeps_its_files_too(tmp_path: Path, way: Way) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        work = "rm remove; chmod 741 keep; ln -s nowhere dangling; ln keep hard; mkfifo fifo; mkdir e"
        work += "; touch -d @99 old"
        assert (await sandbox.commands.run(work)).stderr == ""
        show = "find . ! -name . -printf '%p %y %m %n %l\\n' | sort; stat -c %Y old"
        before, changes = (await sandbox.commands.run(show)).stdout, await sandbox.diff()
        copy = await way(sandbox, backend)
        assert (await copy.commands.run(show)).stdout == before
        assert await copy.diff() == changes

    on_backend(tmp_path, scenario, "unisolated")


def test_processes_stay_behind(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        await s.files.write("n", "")
        command = await s.commands.start("i=0; while :; do i=$((i+1)); echo $i > n; sleep 0.02; done")
        await asyncio.sleep(0.1)
        (copy,) = await copies(s)
        assert await copy.commands.list() == []
        assert (await copy.commands.run("set -- /proc/[0-9]*; echo $#")).stdout == "2\n"
        # The source goes on, the copy stands.
        await counts_on(s)
        still = await copy.files.read("n")
        await asyncio.sleep(0.1)
        assert await copy.files.read("n") == still
        await command.kill()

    in_sandbox(tmp_path, scenario)


def test_copies_are_independent_in_both_directions(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        await s.files.write("f", "before")
        one, two = await copies(s, 2)
        everyone = {"source": s, "one": one, "two": two}
        for name, sandbox in everyone.items():
            await sandbox.commands.run(
                f"echo {name} > f; echo {name} > keep; echo {name} > /tmp/x; rm d/{name}; :"
            )
        for name, sandbox in everyone.items():
            shown = await sandbox.commands.run("cat f keep /tmp/x; ls d")
            left = {"source": "one\ntwo\n", "one": "two\n", "two": "one\n"}[name]
            assert shown.stdout == f"{name}\n" * 3 + left
        await s.kill()
        await one.kill()
        assert await two.files.read("f") == b"two\n"

    in_sandbox(tmp_path, scenario, FILES)


def test_a_chain_of_copies_keeps_every_step(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        for number in range(10):
            await s.commands.run(
                f"echo {number} > step{number}; rm -f step{number - 2}; echo {number} >> log"
            )
            (copy,) = await copies(s)
            await s.kill()
            s = copy
        shown = await s.commands.run("ls; cat log | tr '\\n' ' '")
        assert shown.stdout == "log\nstep8\nstep9\n0 1 2 3 4 5 6 7 8 9 "

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
def test_layers_do_not_pile_up_with_naps_and_copies_of_copies(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox: Sandbox = await backend.create(Template(FILES))
        for number in range(12):
            work = f"echo {number} > f{number % 7}; rm -f f{(number + 3) % 7}; rm -r whole d"
            work += f"; mkdir -p d whole/{number}"
            await sandbox.commands.run(work)
            before = await state_of(sandbox)
            (copy,) = await copies(sandbox)
            await sandbox.kill()
            await copy.pause("filesystem")
            await copy.resume()
            assert await state_of(copy) == before, number
            sandbox = copy
        info = await sandbox.create_snapshot()
        packed = list((tmp_path / "snapshots" / info.id).glob("layer-*-root.tar"))
        assert 1 <= len(packed) <= MAX_LAYERS

    on_backend(tmp_path, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("by_connect", [False, True])
def test_files_survive_every_one_of_several_naps(tmp_path: Path, by_connect: bool) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox: Sandbox = await backend.create(Template(FILES))
        for number in range(4):
            await sandbox.commands.run(f"echo {number} >> log; echo {number} > n{number}; rm -f d/one")
            await sandbox.pause("filesystem")
            await sandbox.pause("filesystem")
            assert (await sandbox.get_info()).state == "paused"
            assert [info.state for info in await backend.list()] == ["paused"]
            if by_connect:
                sandbox = await backend.connect(sandbox.id)
            else:
                await sandbox.resume()
                await sandbox.resume()
            assert (await sandbox.get_info()).state == "running"
            shown = await sandbox.commands.run("cat log; ls d n*")
            assert shown.stdout.split() == [
                *map(str, range(number + 1)),
                *(f"n{i}" for i in range(number + 1)),
                "d:",
                "two",
            ]
        assert await backend.list_snapshots() == []
        assert list((tmp_path / "snapshots").iterdir()) == []

    on_backend(tmp_path, scenario)


def test_a_paused_sandbox_refuses_and_a_running_one_works(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        assert backend.launcher_pid is not None
        await sandbox.pause("filesystem")
        for refused in (
            lambda: sandbox.files.read("keep"),
            lambda: sandbox.commands.run("true"),
            lambda: sandbox.fork(),
            lambda: sandbox.create_snapshot(),
            lambda: sandbox.diff(),
            lambda: sandbox.commands.start("true"),
            lambda: sandbox.migrate(backend),
            lambda: sandbox.run_tests(["x.py"]),
        ):
            with pytest.raises(SandboxStateError) as raised:
                await refused()
            assert raised.value.fix == "resume it first"
        await sandbox.resume()
        assert await sandbox.files.read("keep") == b"template"

    on_backend(tmp_path, scenario)


def test_memory_is_not_kept_and_the_error_names_who_keeps_it(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        for refused in (s.pause("full"), s.pause(), s.create_snapshot("full")):
            with pytest.raises(Unsupported, match="vm or gvisor"):
                await refused
        assert (await s.commands.run("echo on")).stdout == "on\n"

    in_sandbox(tmp_path, scenario)


def test_killing_a_sleeping_sandbox_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.pause("filesystem")
        await sandbox.kill()
        assert list((tmp_path / "snapshots").iterdir()) == []
        assert await backend.list() == []
        with pytest.raises(SandboxError, match="killed"):
            await sandbox.resume()
            await sandbox.files.read("keep")
        with pytest.raises(SandboxMissingError):
            await backend.connect(sandbox.id)

    on_backend(tmp_path, scenario)


def test_a_sandbox_whose_saved_state_is_damaged_stays_asleep_and_says_why(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.pause("filesystem")
        (snapshot,) = (tmp_path / "snapshots").iterdir()
        file = snapshot / "layer-0-root.tar"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        for _ in range(2):
            with pytest.raises(SnapshotError, match="torn"):
                await sandbox.resume()
            assert (await sandbox.get_info()).state == "paused"
        file.write_bytes(whole)
        await sandbox.resume()
        assert await sandbox.files.read("keep") == b"template"

    on_backend(tmp_path, scenario)


def test_a_pause_that_fails_leaves_the_sandbox_running_and_thawed(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.files.write("n", "")
        command = await sandbox.commands.start("i=0; while :; do i=$((i+1)); echo $i > n; sleep 0.01; done")
        (tmp_path / "snapshots").write_text("in the way")
        for refused in (lambda: sandbox.pause("filesystem"), sandbox.create_snapshot):
            with pytest.raises(SnapshotError):
                await refused()
            assert (await sandbox.get_info()).state == "running"
        await counts_on(sandbox)
        await command.kill()

    on_backend(tmp_path, scenario)


@pytest.mark.slow
def test_what_cannot_be_packed_can_still_be_forked_and_goes_on(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        deep = "import os\nfor _ in range(1500):\n    os.mkdir('deeper'); os.chdir('deeper')\n"
        await s.files.write("deep.py", deep)
        assert (await s.commands.run("mkdir t; cd t; python3 ../deep.py")).exit_code == 0
        with pytest.raises(ToolArgumentError, match="bytes"):
            await s.pause("filesystem")
        assert (await s.commands.run("sleep 0.01; echo on")).stdout == "on\n"
        (copy,) = await copies(s)
        await copy.kill()
        # Its layer was removed without taking the fork server along.
        (second,) = await copies(s)
        assert (await second.commands.run("cd t/deeper/deeper; echo on")).stdout == "on\n"

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
def test_files_full_of_holes_do_not_fill_the_host(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        await s.commands.run("for i in $(seq 60); do truncate -s 30M h$i; done")
        (copy,) = await copies(s)
        assert (await copy.commands.run("stat -c '%s %b' h1")).stdout == f"{30 << 20} 0\n"
        with pytest.raises(ToolArgumentError, match="holes"):
            await s.create_snapshot()

    in_sandbox(tmp_path, scenario)


def test_snapshots_outlive_their_backend(tmp_path: Path) -> None:
    async def first(backend: ForkServerBackend) -> str:
        sandbox = await backend.create(
            Template(FILES, "named"), Resources(num_processes=33), metadata={"k": "v"}
        )
        await sandbox.commands.run("echo changed > change; rm -r whole; echo t > /tmp/t")
        return (await sandbox.create_snapshot(name="mine")).id

    async def second(backend: ForkServerBackend) -> None:
        (info,) = await backend.list_snapshots()
        assert (info.id, info.name, info.kind, info.backend) == (snapshot, "mine", "filesystem", "local")
        one, two = await asyncio.gather(*(backend.create(snapshot=snapshot) for _ in range(2)))
        for sandbox in (one, two):
            assert (await sandbox.commands.run("cat change /tmp/t; ls")).stdout.startswith(
                "changed\nt\nchange\nd\n"
            )
            shown = await sandbox.get_info()
            assert (shown.parent, shown.metadata, shown.resources.num_processes) == (snapshot, {"k": "v"}, 33)
            assert (shown.template, set(await sandbox.diff())) == ("named", {"change", "whole/x"})
        await backend.delete_snapshot(snapshot)
        assert await one.files.read("change") == b"changed\n"
        with pytest.raises(SnapshotError, match="does not exist"):
            await backend.create(snapshot=snapshot)

    snapshot = on_backend(tmp_path, first)
    on_backend(tmp_path, second)


def test_a_snapshot_travels_as_a_file(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.files.write("f", "x")
        info = await sandbox.create_snapshot()
        await backend.export_snapshot(info.id, tmp_path / "file")
        other = open_local(tmp_path / "other")
        try:
            assert (await other.import_snapshot(tmp_path / "file")).id == info.id
            copy = await other.create(snapshot=info.id)
            assert await copy.files.read("f") == b"x"
        finally:
            await other.close()

    on_backend(tmp_path / "state", scenario)


def test_a_sandbox_moves_to_another_host_and_ends_here(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        other = open_local(tmp_path / "there")
        try:
            sandbox = await backend.create(Template(FILES), timeout_s=50.0, metadata={"k": "v"})
            await sandbox.files.write("f", "moved")
            moved = await sandbox.migrate(other)
            assert (await moved.files.read("f"), (await moved.get_info()).metadata) == (b"moved", {"k": "v"})
            assert ((await moved.get_info()).expires_s or 0) > 0
            assert [await backend.list(), len(await other.list())] == [[], 1]
            with pytest.raises(SandboxError, match="killed"):
                await sandbox.files.read("f")
            for place in ("here", "there"):
                assert list((tmp_path / place / "snapshots").iterdir()) == []
        finally:
            await other.close()

    on_backend(tmp_path / "here", scenario)


def test_a_move_that_fails_leaves_the_sandbox_here(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        closed = open_local(tmp_path / "there")
        await closed.close()
        with pytest.raises(SandboxError):
            await sandbox.migrate(closed)
        with pytest.raises(Unsupported, match=r"from local to local, not to memory.*files.download"):
            await sandbox.migrate(MemoryBackend())
        assert await sandbox.files.read("keep") == b"template"
        assert list((tmp_path / "here/snapshots").iterdir()) == []
        assert list((tmp_path / "there/snapshots").iterdir()) == []

    on_backend(tmp_path / "here", scenario)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02])
def test_cancelled_copies_leave_neither_processes_nor_a_frozen_source(tmp_path: Path, delay_s: float) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.commands.run("head -c 20000000 /dev/zero > big; sleep 31415 >/dev/null 2>&1 &")
        assert await has_processes(backend, 2)
        operations: list[Callable[[], Awaitable[object]]] = [
            lambda: sandbox.fork(4), lambda: sandbox.pause("filesystem"), sandbox.create_snapshot,
            lambda: sandbox.migrate(backend),
        ]  # fmt: skip
        for operation in operations:
            task = asyncio.ensure_future(operation())
            await asyncio.sleep(delay_s)
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(result, BaseException):
                return
            assert (await sandbox.commands.run("ps 2>/dev/null; echo on")).stdout.endswith("on\n")
            assert [info.id for info in await backend.list()] == [sandbox.id]
        states = "cat /proc/[0-9]*/stat | grep -c ') [Tt] '"
        assert (await sandbox.commands.run(states)).stdout == "0\n"

        assert await has_processes(backend, 2)
        assert await becomes_true(lambda: list((tmp_path / "snapshots").glob("snap-*")) == [])

    on_backend(tmp_path, scenario)


def test_copies_that_had_started_when_the_caller_gave_up_are_killed() -> None:
    killed: list[str] = []

    class Made(MachineSandbox):
        async def kill(self) -> None:
            killed.append(self.id)

    async def make(name: str, delay_s: float) -> MachineSandbox:
        await asyncio.sleep(delay_s)
        if name == "broken":
            raise ValueError(name)
        return Made(MachineBackend(), name, Spec(Template()))

    async def scenario() -> None:
        task = asyncio.create_task(gather_copies([make("quick", 0.0), make("slow", 60.0)]))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert killed == ["quick"]
        with pytest.raises(ValueError, match="broken"):
            await gather_copies([make("other", 0.0), make("broken", 0.0)])
        assert killed == ["quick", "other"]

    asyncio.run(scenario())


def test_a_copy_that_is_given_up_halfway_leaves_the_source_awake(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        await s.commands.run("head -c 50000000 /dev/zero | split -b 20000000")
        await s.files.write("n", "")
        command = await s.commands.start("i=0; while :; do i=$((i+1)); echo $i > n; sleep 0.01; done")
        for delay_s in (0.001, 0.003, 0.006, 0.01, 0.015):
            task = asyncio.create_task(s.fork())
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await counts_on(s)
        await command.kill()

    in_sandbox(tmp_path, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02])
def test_a_cancelled_resume_leaves_the_sandbox_asleep_and_wakeable(tmp_path: Path, delay_s: float) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        await sandbox.files.write("f", "kept")
        await sandbox.pause("filesystem")
        task = asyncio.create_task(sandbox.resume())
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sandbox.resume()
        assert await sandbox.files.read("f") == b"kept"

    on_backend(tmp_path, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.015])
@pytest.mark.parametrize("operation", ["pause", "resume", "fork"])
def test_a_kill_in_the_middle_wins_and_leaves_nothing(tmp_path: Path, operation: str, delay_s: float) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        if operation == "resume":
            await sandbox.pause("filesystem")
        under_way: dict[str, Callable[[], Awaitable[object]]] = {
            "pause": lambda: sandbox.pause("filesystem"), "resume": sandbox.resume,
            "fork": lambda: sandbox.fork(2),
        }  # fmt: skip
        task = asyncio.ensure_future(under_way[operation]())
        await asyncio.sleep(delay_s)
        await sandbox.kill()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert result is None or isinstance(result, (list, SandboxError)), result
        for copy in result if isinstance(result, list) else ():
            await copy.kill()
        assert await backend.list() == []
        assert (await sandbox.get_info()).state == "killed"

        assert await has_processes(backend, 0)
        assert await becomes_true(lambda: list((tmp_path / "snapshots").glob("*")) == [])

    on_backend(tmp_path, scenario)


def test_what_is_answered_while_a_sandbox_falls_asleep_is_kept(tmp_path: Path) -> None:
    """A write is either part of the copy or refused; none is acknowledged and then lost."""

    async def scenario(backend: ForkServerBackend) -> None:
        sandbox = await backend.create(Template({"big": b"x" * (8 << 20)}))
        await sandbox.files.write("bigger", b"y" * (8 << 20))
        kept: list[str] = []

        async def write() -> None:
            for number in range(100_000):
                try:
                    await sandbox.files.write(f"n{number}", "1")
                except SandboxStateError:
                    return
                kept.append(f"n{number}")

        writing = asyncio.create_task(write())
        assert await becomes_true(lambda: kept != [])
        await sandbox.pause("filesystem")
        await writing
        await sandbox.resume()
        assert kept
        assert set(kept) <= {entry.path for entry in await sandbox.files.list()}

    on_backend(tmp_path, scenario)
