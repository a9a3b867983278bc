"""Faults at every step: machines killed and disks full while a guest is saved and restored."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Template
from etude.sandbox.vm.backend import VmBackend
from tests.sandbox.vm.guests import SMALL, machines_below, with_backend
from tests.sandbox.vm.programs import alive, start_program

pytestmark = [pytest.mark.slow, pytest.mark.foreign]
OPERATIONS = ("create_snapshot", "pause", "fork")
STEPS = ("save: held", "save: stopped", "save: written")
FATAL = [("create_snapshot", "save: held"), ("pause", "save: stopped"), ("fork", "save: written")]
"""One way for all; a machine that dies once all of it is written has been put to sleep: see the next test."""


@pytest.mark.parametrize(("operation", "step"), FATAL)
def test_a_machine_killed_while_it_is_saved_leaves_no_snapshot(
    vm_state: Path, operation: str, step: str
) -> None:
    async def on_step(name: str) -> None:
        if name == step:
            for pid in machines_below(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)

    async def scenario(backend: VmBackend) -> None:
        sandbox = await backend.create(Template(), SMALL)
        with pytest.raises(SandboxError):
            await getattr(sandbox, operation)()
        assert sandbox.state == "lost"
        assert list((vm_state / "snapshots").glob("*")) + list((vm_state / "snapshots").glob(".*")) == []

    with_backend(vm_state, scenario, on_step)


def test_a_machine_killed_after_it_was_written_sleeps_well(vm_state: Path) -> None:
    async def on_step(name: str) -> None:
        if name == "save: written":
            for pid in machines_below(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)

    async def scenario(backend: VmBackend) -> None:
        sandbox = await backend.create(Template({"a": "1"}), SMALL)
        await sandbox.pause()
        await sandbox.resume()
        assert await sandbox.files.read("a") == b"1"

    with_backend(vm_state, scenario, on_step)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_state_that_cannot_be_written_leaves_the_sandbox_running(vm_state: Path, operation: str) -> None:
    fails_at = ""

    async def on_step(name: str) -> None:
        if name == fails_at:
            raise OSError(28, "No space left on device")

    async def scenario(backend: VmBackend) -> None:
        nonlocal fails_at
        sandbox = await backend.create(Template({"a": "1"}), SMALL)
        await start_program(sandbox)
        before = await alive(sandbox)
        for fails_at in STEPS:
            with pytest.raises((SandboxError, OSError), match="No space left"):
                await getattr(sandbox, operation)()
            assert sandbox.state == "running", fails_at
            assert (await alive(sandbox))[:2] == before[:2], fails_at
        fails_at = ""
        await sandbox.pause()
        await sandbox.resume()
        assert (await alive(sandbox))[:2] == before[:2]

    with_backend(vm_state, scenario, on_step)


def test_a_limit_on_file_sizes_stops_a_save_midway(vm_state: Path) -> None:
    async def scenario(backend: VmBackend) -> None:
        sandbox = await backend.create(Template(), SMALL)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, hard))
        try:
            with pytest.raises(SandboxError, match="File too large"):
                await sandbox.create_snapshot()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert (await sandbox.commands.run("echo on", timeout_s=60)).stdout == "on\n"

    with_backend(vm_state, scenario)
    assert list((vm_state / "snapshots").iterdir()) == []


@pytest.mark.parametrize("step", ["restore: checked", "restore: standing"])
def test_a_machine_killed_while_it_wakes_stays_asleep(vm_state: Path, step: str) -> None:
    armed = False

    async def on_step(name: str) -> None:
        if armed and name == step:
            machines = machines_below(os.getpid())
            for pid in machines:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            if not machines:
                raise SandboxError("nothing to kill yet", field="test")

    async def scenario(backend: VmBackend) -> None:
        nonlocal armed
        sandbox = await backend.create(Template(), SMALL)
        assert isinstance(sandbox, MachineSandbox)
        await start_program(sandbox)
        before = await alive(sandbox)
        await sandbox.pause()
        armed = True
        with pytest.raises(SandboxError):
            await sandbox.resume()
        assert sandbox.state == "paused"
        armed = False
        await sandbox.resume()
        assert (await alive(sandbox))[:2] == before[:2]

    with_backend(vm_state, scenario, on_step)


def test_a_sleep_that_cannot_be_published_is_no_sleep(vm_state: Path) -> None:
    armed = False

    async def on_step(name: str) -> None:
        if armed and name == "save: written":
            for draft in (vm_state / "snapshots").glob(".etude-draft-*"):
                shutil.rmtree(draft)

    async def scenario(backend: VmBackend) -> None:
        nonlocal armed
        sandbox = await backend.create(Template({"a": "1"}), SMALL)
        armed = True
        with pytest.raises((SandboxError, OSError)):
            await sandbox.pause()
        armed = False
        assert sandbox.state == "running"
        assert await sandbox.files.read("a") == b"1"
        await sandbox.pause()
        await sandbox.resume()
        assert await sandbox.files.read("a") == b"1"

    with_backend(vm_state, scenario, on_step)
