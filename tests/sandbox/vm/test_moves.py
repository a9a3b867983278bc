"""Live moves between two backends that share no file but the guest image."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import SandboxError
from etude.sandbox.errors import Unsupported
from etude.sandbox.fake import MemoryBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Template
from etude.sandbox.vm.backend import VmBackend
from etude.sandbox.vm.migration import Step, Ticket
from etude.sandbox.vm.qemu import Qemu
from tests.sandbox.vm.guests import SMALL, machines_below, make_state, no_step
from tests.sandbox.vm.programs import alive, start_program

pytestmark = [pytest.mark.slow, pytest.mark.foreign]

TICKER = """
import os, time
stop = open("/dev/shm/gaps", "w")
data = bytearray(os.urandom(24 << 20))
last = time.monotonic()
worst = 0.0
place = 0
while True:
    for _ in range(20):
        place = (place + 4096 * 37) % len(data)
        data[place] = (data[place] + 1) % 256
    open("disk", "ab").write(b"x" * 64)
    time.sleep(0.003)
    now = time.monotonic()
    if now - last > worst:
        worst = now - last
        stop.seek(0)
        stop.write(f"{worst:.4f}")
        stop.flush()
    last = now
"""
"""Works on its memory and its disk, and notes its longest standstill."""


def with_two(
    state: Path,
    directory: Path,
    scenario: Callable[[VmBackend, VmBackend], Awaitable[Any]],
    on_step: Step = no_step,
    host: str | None = None,
) -> Any:
    """Runs a scenario on a source and a target, closes both, and sees that nothing is left."""
    other = make_state(directory / "other")

    async def run() -> Any:
        source = VmBackend(state, accelerator="tcg", on_step=on_step)
        target = VmBackend(other, accelerator="tcg", migration_host=host)
        try:
            result = await scenario(source, target)
        finally:
            await source.close()
            await target.close()
        assert machines_below(os.getpid()) == []
        assert list((state / "vm").glob("*")) + list((other / "vm").glob("*")) == []
        return result

    # Not below `directory`: names of sockets are short.
    with tempfile.TemporaryDirectory() as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", ours)
        result = asyncio.run(run())
        assert list(Path(ours).iterdir()) == []
    return result


def machine_of(sandbox: MachineSandbox, backend: VmBackend) -> Qemu:
    return backend._machines[sandbox.id].qemu


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_sandbox_moves_with_its_processes_connections_and_files(
    vm_state: Path, tmp_path: Path, host: str | None
) -> None:
    async def scenario(source: VmBackend, target: VmBackend) -> None:
        sandbox = await source.create(Template({"a": "1"}), SMALL, timeout_s=3600)
        await start_program(sandbox)
        await sandbox.files.write("b", "x" * 5_000_000)
        session = await sandbox.create_session()
        await sandbox.run_in_session(session, "word=kept", 60)
        before = await alive(sandbox)
        moved = await sandbox.migrate(target)
        assert isinstance(moved, MachineSandbox)
        assert sandbox.state == "killed"
        assert await source.list() == []
        after = await alive(moved)
        assert after[:2] == before[:2]
        assert await moved.files.read("b", 6_000_000) == b"x" * 5_000_000
        assert (await moved.run_in_session(session, "echo $word", 60)).stdout == "kept\n"
        assert sorted(await moved.diff()) == ["b", "log", "program.py"]
        info = await moved.get_info()
        assert info.expires_s is not None
        await moved.pause()
        await moved.resume()
        back = await moved.migrate(source)
        assert (await alive(back))[:2] == before[:2]
        (fork,) = await back.fork()
        assert not isinstance(fork, SandboxError)
        assert (await alive(fork))[:2] == before[:2]

    with_two(vm_state, tmp_path, scenario, host=host)


def test_a_guest_that_works_hard_is_moved_whole(vm_state: Path, tmp_path: Path) -> None:
    async def scenario(source: VmBackend, target: VmBackend) -> None:
        sandbox = await source.create(Template({"ticker.py": TICKER}), SMALL)
        await start_program(sandbox)
        await sandbox.commands.start("exec python3 ticker.py > ticks 2>&1")
        await asyncio.sleep(3)
        token = (await alive(sandbox))[1]
        here, there = source, target
        for _ in range(4):
            sandbox = await sandbox.migrate(there)
            move = here.last_move
            assert move is not None
            assert 0 < move.downtime_s < move.total_s
            here, there = there, here
            assert (await alive(sandbox))[1] == token
        shown = await sandbox.commands.run("cat /dev/shm/gaps ticks; dmesg | tail -3", timeout_s=60)
        assert float(shown.stdout.split()[0]) > 0

    with_two(vm_state, tmp_path, scenario)


MOVE_STEPS = ("migrate: disk", "migrate: held", "migrate: stopped", "migrate: sent")


@pytest.mark.parametrize("fault", ["target dies", "error"])
def test_a_move_that_fails_leaves_the_sandbox_where_it_was(
    vm_state: Path, tmp_path: Path, fault: str
) -> None:
    fails_at = ""
    targets: list[VmBackend] = []

    async def on_step(name: str) -> None:
        if name != fails_at:
            return
        if fault == "error":
            raise SandboxError("the network fails", field="test")
        for machine in targets[0].arrivals.machines:
            os.kill(machine.qemu.pid, signal.SIGKILL)
        await asyncio.sleep(0.2)

    async def scenario(source: VmBackend, target: VmBackend) -> None:
        nonlocal fails_at
        targets.append(target)
        sandbox = await source.create(Template({"a": "1"}), SMALL)
        await start_program(sandbox)
        before = await alive(sandbox)
        for fails_at in MOVE_STEPS:
            with pytest.raises(SandboxError):
                await sandbox.migrate(target)
            assert sandbox.state == "running", fails_at
            assert await target.list() == []
            assert machines_below(os.getpid()) == [machine_of(sandbox, source).pid]
            assert (await alive(sandbox))[:2] == before[:2], fails_at
        fails_at = ""
        await sandbox.files.write("a", "2")
        moved = await sandbox.migrate(target)
        assert (await alive(moved))[:2] == before[:2]
        assert await moved.files.read("a") == b"2"

    with_two(vm_state, tmp_path, scenario, on_step)


@pytest.mark.parametrize("step", MOVE_STEPS[:3])
def test_a_source_that_dies_leaves_nothing_at_the_target(vm_state: Path, tmp_path: Path, step: str) -> None:
    sandboxes: list[tuple[MachineSandbox, VmBackend]] = []

    async def on_step(name: str) -> None:
        if name == step:
            os.kill(machine_of(*sandboxes[0]).pid, signal.SIGKILL)
            await asyncio.sleep(0.2)

    async def scenario(source: VmBackend, target: VmBackend) -> None:
        sandbox = await source.create(Template(), SMALL)
        sandboxes.append((sandbox, source))
        with pytest.raises(SandboxError):
            await sandbox.migrate(target)
        assert sandbox.state == "lost"
        assert await target.list() == []
        assert machines_below(os.getpid()) == []

    with_two(vm_state, tmp_path, scenario, on_step)


def test_a_cancelled_move_leaves_the_sandbox_where_it_was(vm_state: Path, tmp_path: Path) -> None:
    async def scenario(source: VmBackend, target: VmBackend) -> None:
        sandbox = await source.create(Template(), SMALL)
        await start_program(sandbox)
        before = await alive(sandbox)
        for delay_s in (0.05, 0.3, 0.6, 0.9):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await sandbox.migrate(target)
                    raise TimeoutError
            if sandbox.state == "killed":
                return
            assert (await alive(sandbox))[:2] == before[:2]
            assert await target.list() == []

    with_two(vm_state, tmp_path, scenario)


def test_other_backends_and_other_versions_are_refused(vm_state: Path, tmp_path: Path) -> None:
    async def scenario(source: VmBackend, target: VmBackend) -> None:
        sandbox = await source.create(Template(), SMALL)
        with pytest.raises(Unsupported, match="another vm backend"):
            await sandbox.migrate(MemoryBackend())
        offer = source.offer(sandbox)
        with pytest.raises(SandboxError, match="cannot run here"):
            await target.prepare_incoming(dataclasses.replace(offer, version="0.0"))
        ticket = await target.prepare_incoming(offer)
        assert Ticket(**json.loads(json.dumps(dataclasses.asdict(ticket)))) == ticket
        await target.abandon(ticket.id)
        assert len(machines_below(os.getpid())) == 1

    with_two(vm_state, tmp_path, scenario)
