"""Guests under emulation: what a sandbox of the vm backend does, survives and leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude.sandbox.vm.backend import VmBackend
from tests.sandbox.vm.guests import SMALL, machines_below, with_backend
from tests.sandbox.vm.programs import alive, start_program

pytestmark = pytest.mark.foreign


def test_a_new_sandbox_runs_commands_with_the_templates_files(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        sandbox = await backend.create(Template({"a.txt": "one\n", "d/b.txt": "two\n"}), SMALL)
        await sandbox.files.write("made/by-the-owner", "x")
        result = await sandbox.commands.run(
            "cat a.txt d/b.txt; echo more >> made/by-the-owner; id -un; ls /sys/class/net", timeout_s=60
        )
        assert (result.stdout, result.stderr) == ("one\ntwo\nagent\nlo\n", "")
        assert await sandbox.diff() == {"made/by-the-owner": b"xmore\n"}

    with_backend(vm_state, scenario)


@pytest.mark.slow
def test_two_sleeps_keep_memory_connection_and_files(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        sandbox = await backend.create(Template(), SMALL)
        waiting = await sandbox.commands.start("word=kept; cd /tmp; read line; echo $word $line $PWD")
        await start_program(sandbox)
        before = await alive(sandbox)
        for cycle in range(2):
            name = f"cycle-{cycle}"
            await sandbox.files.write(f"disk/{name}", name * 1000)
            await sandbox.commands.run(f"echo {name} > /tmp/{name}", timeout_s=60)
            await sandbox.pause()
            assert machines_below(os.getpid()) == []
            await (backend.connect(sandbox.id) if cycle == 1 else sandbox.resume())
            after = await alive(sandbox)
            assert after[:2] == before[:2]
            assert after[2] > before[2]
            before = after
            for kept in range(cycle + 1):
                assert await sandbox.files.read(f"disk/cycle-{kept}") == f"cycle-{kept}".encode() * 1000
                shown = await sandbox.commands.run(f"cat /tmp/cycle-{kept}", timeout_s=60)
                assert shown.stdout == f"cycle-{kept}\n"
        await waiting.send_stdin("on\n")
        assert (await waiting.wait(60)).stdout == "kept on /tmp\n"
        before_s = time.time()
        clock = await sandbox.commands.run("date +%s", timeout_s=60)
        assert before_s - 10 < int(clock.stdout) < time.time() + 10
        assert await backend.list_snapshots() == []

    with_backend(vm_state, scenario)
    assert list((vm_state / "snapshots").iterdir()) == []


@pytest.mark.slow
def test_forks_made_at_once_live_on_apart(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        origin = await backend.create(Template({"a": "1"}), SMALL)
        await start_program(origin)
        token = (await alive(origin))[1]
        forks = await origin.fork(4)
        copies = [fork for fork in forks if not isinstance(fork, SandboxError)]
        assert len(copies) == 4, forks
        for number, copy in enumerate(copies):
            await copy.files.write("a", f"copy {number}")
        everyone = [origin, *copies]
        assert {(await alive(one))[1] for one in everyone} == {token}
        contents = [await one.files.read("a") for one in everyone]
        assert contents == [b"1", *(f"copy {number}".encode() for number in range(4))]
        cmd = "hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid; od -An -tx1 -N16 /dev/urandom"
        shown = [(await one.commands.run(cmd, timeout_s=60)).stdout.splitlines() for one in everyone]
        for lines in zip(*shown, strict=True):
            assert len(set(lines)) == 5, "no two copies have the same name, machine-id or random numbers"
        before_s = time.time()
        clocks = [(await one.commands.run("date +%s", timeout_s=60)).stdout for one in everyone]
        assert all(before_s - 30 < int(clock) < time.time() + 30 for clock in clocks)

    with_backend(vm_state, scenario)


@pytest.mark.slow
def test_a_fork_of_a_fork_and_a_snapshot_of_it_keep_everything(vm_state: Path, tmp_path: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        origin = await backend.create(Template(), SMALL)
        await start_program(origin)
        token = (await alive(origin))[1]
        (first,) = await origin.fork()
        assert not isinstance(first, SandboxError)
        await origin.kill()
        await first.files.write("of", "first")
        (second,) = await first.fork()
        assert not isinstance(second, SandboxError)
        await first.kill()
        info = await second.create_snapshot(name="kept")
        await backend.export_snapshot(info.id, tmp_path / "snapshot.tar")
        await backend.delete_snapshot(info.id)
        assert (await alive(second))[1] == token
        await second.kill()
        imported = await backend.import_snapshot(tmp_path / "snapshot.tar")
        third = await backend.create(snapshot=imported.id)
        await backend.delete_snapshot(imported.id)
        assert (await alive(third))[1] == token
        assert await third.files.read("of") == b"first"
        info = await third.create_snapshot()
        await backend.delete_snapshot(info.id)

    with_backend(vm_state, scenario)


@pytest.mark.slow
def test_a_cancelled_start_leaves_nothing(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        await (await backend.create(Template(), SMALL)).kill()
        for delay_s in (0.0, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.02, 0.06, 0.12, 0.2, 0.3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await (await backend.create(Template(), SMALL)).kill()
            assert await backend.list() == []
            assert list((vm_state / "vm").glob("*/*")) == []
            assert machines_below(os.getpid()) == []

    with_backend(vm_state, scenario)


@pytest.mark.slow
def test_a_machine_that_dies_is_lost_and_says_so(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        sandbox = await backend.create(Template(), SMALL)
        waiting = asyncio.ensure_future(sandbox.commands.run("sleep 60", timeout_s=90))
        await asyncio.sleep(0.5)
        for pid in machines_below(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await waiting
        assert sandbox.state == "lost"
        with pytest.raises(SandboxError):
            await sandbox.files.read("a")
        with pytest.raises(SandboxError):
            await sandbox.create_snapshot()
        await sandbox.kill()

    with_backend(vm_state, scenario)


_OWNER = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.types import Resources
from etude.sandbox.vm.backend import VmBackend

async def main():
    backend = VmBackend(Path(sys.argv[1]), accelerator="tcg")
    await backend.create(resources=Resources(memory_bytes=192 << 20, disk_bytes=32 << 20))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_killed_owner_takes_its_machines_along(vm_state: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER, str(vm_state)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        machines = machines_below(owner.pid)
        assert len(machines) == 1
        owner.kill()
    end_s = time.monotonic() + 60
    while any(_runs(pid) for pid in machines) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in machines)

    async def scenario(backend: VmBackend) -> None:
        await (await backend.create(Template(), SMALL)).kill()

    # The next backend removes what the dead one had on disk; with_backend sees that nothing is left.
    with_backend(vm_state, scenario)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


@pytest.mark.slow
def test_a_guest_has_no_device_but_its_own_and_the_agent_is_nobody(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        sandbox = await backend.create(Template(), SMALL)
        cmd = (
            "ls /sys/class/net; cat /proc/1/environ; cat /dev/vda; cat /dev/vdb;"
            "echo x > /dev/virtio-ports/etude; "
            "touch /usr/x; unshare -r true; find / -xdev -perm /6000 2>/dev/null"
        )
        result = await sandbox.commands.run(cmd, timeout_s=120)
        assert result.stdout == "lo\n"
        assert result.stderr.count("Permission denied") == 4
        assert "Read-only file system" in result.stderr

    with_backend(vm_state, scenario)


FILL = """
import ctypes, os
libc, message = ctypes.CDLL(None), ctypes.create_string_buffer(b"x" * 8200)
libc.shmat.restype = ctypes.c_void_p
for folder in ("/tmp", "/dev/shm"):
    with open(folder + "/full", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 18))
        except OSError:
            print(folder, flush=True)
    try:
        for number in range(1 << 20):
            os.close(os.open(f"{folder}/{number}", os.O_CREAT))
    except OSError:
        print("files", flush=True)
while (queue := libc.msgget(0, 0o1600)) >= 0:
    while libc.msgsnd(queue, message, 8192, 0o4000) == 0:
        pass
print("messages", flush=True)
while (segment := libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600)) >= 0:
    ctypes.memset(libc.shmat(segment, None, 0), 1, 1 << 20)
print("segments", flush=True)
while libc.semget(0, 250, 0o1600) >= 0:
    pass
print("semaphores", flush=True)
"""


@pytest.mark.slow
def test_all_that_outlives_its_processes_may_be_filled_and_the_guest_goes_on(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        small = Resources(memory_bytes=96 << 20, disk_bytes=8 << 20, file_bytes=1 << 30)
        sandbox = await backend.create(Template({"fill.py": FILL}), small)
        filled = await sandbox.commands.run("python3 -S fill.py", timeout_s=300)
        expected = ["/tmp", "files", "/dev/shm", "files", "messages", "segments", "semaphores"]
        assert filled.stdout.splitlines() == expected
        assert (await sandbox.commands.run("python3 -S -c 'print(1)'", timeout_s=60)).stdout == "1\n"

    with_backend(vm_state, scenario)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give rights up")
def test_qemu_gives_up_the_rights_of_root_and_its_system_calls(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        await backend.create(Template(), SMALL)
        (pid,) = machines_below(os.getpid())
        status = status_of(pid)
        assert set(status["Uid"].split()) == {"65534"}
        assert status["Groups"].split() == []
        assert int(status["CapEff"], 16) == 0
        assert status["Seccomp"] == "2"

    with_backend(vm_state, scenario)
