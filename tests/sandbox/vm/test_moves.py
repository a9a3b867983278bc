"""Moves between two backends that share no file but the guest image."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import SandboxError
from etude.sandbox.channel import Channel
from etude.sandbox.errors import Unsupported
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.snapshots import Snapshot
from etude.sandbox.template import Template
from etude.sandbox.vm.backend import VmBackend
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.vm.guests import SMALL, machines_below, make_state
from tests.sandbox.vm.programs import alive, start_program

pytestmark = [pytest.mark.slow, pytest.mark.foreign]


def with_two(
    state: Path,
    directory: Path,
    scenario: Callable[[VmBackend, VmBackend], Awaitable[Any]],
) -> Any:
    """Runs a scenario on a source and a target, closes both, and sees that nothing is left."""
    other = make_state(directory / "other")

    async def run() -> Any:
        source = VmBackend(state, accelerator="tcg")
        target = VmBackend(other, accelerator="tcg")
        try:
            result = await scenario(source, target)
        finally:
            await source.close()
            await target.close()
        assert machines_below(os.getpid()) == []
        assert list((state / "vm").glob("*")) + list((other / "vm").glob("*")) == []
        return result

    return asyncio.run(run())


def test_a_sandbox_moves_with_its_processes_connections_and_files(vm_state: Path, tmp_path: Path) -> None:
    async def scenario(source: VmBackend, target: VmBackend) -> None:
        sandbox = await source.create(Template({"a": "1"}), SMALL, timeout_s=3600)
        await start_program(sandbox)
        await sandbox.files.write("b", "x" * 5_000_000)
        waiting = await sandbox.commands.start("word=kept; read line; echo $word $line")
        before = await alive(sandbox)
        moved = await sandbox.migrate(target)
        assert isinstance(moved, MachineSandbox)
        assert sandbox.state == "killed"
        assert await source.list() == []
        after = await alive(moved)
        assert after[:2] == before[:2]
        assert await moved.files.read("b", 6_000_000) == b"x" * 5_000_000
        there = await moved.commands.connect(waiting.pid)
        await there.send_stdin("on\n")
        assert (await there.wait(60)).stdout == "kept on\n"
        assert sorted(await moved.diff()) == ["b", "log", "program.py"]
        info = await moved.get_info()
        assert info.expires_s is not None
        back = await moved.migrate(source)
        assert (await alive(back))[:2] == before[:2]
        for backend in (source, target):
            assert await backend.list_snapshots() == []

    with_two(vm_state, tmp_path, scenario)


def test_a_move_that_fails_leaves_the_sandbox_where_it_was(vm_state: Path, tmp_path: Path) -> None:
    class Refusing(VmBackend):
        async def restore(self, sandbox: MachineSandbox, snapshot: Snapshot) -> Channel:
            raise SandboxError("the network fails", field="test")

    async def scenario(source: VmBackend, target: VmBackend) -> None:
        sandbox = await source.create(Template({"a": "1"}), SMALL)
        await start_program(sandbox)
        before = await alive(sandbox)
        with pytest.raises(SandboxError, match="the network fails"):
            await sandbox.migrate(Refusing(target.state, accelerator="tcg"))
        with pytest.raises(Unsupported, match="backends of one kind"):
            await sandbox.migrate(MemoryBackend())
        assert sandbox.state == "running"
        assert (await alive(sandbox))[:2] == before[:2]
        assert len(machines_below(os.getpid())) == 1
        for backend in (source, target):
            assert await backend.list_snapshots() == []

    with_two(vm_state, tmp_path, scenario)
