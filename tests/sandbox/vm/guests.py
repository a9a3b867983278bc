"""Backends over real guests for tests: one state directory for a whole run, so that guests are warmed once.

The guest image is the one of the usual state directory (building it needs the network); without it, or
without QEMU, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.types import Resources
from etude.sandbox.vm.backend import Step, VmBackend
from etude.sandbox.vm.image import images_directory
from etude.sandbox.vm.qemu import PROGRAM

Result = TypeVar("Result")
SMALL = Resources(memory_bytes=192 << 20, disk_bytes=32 << 20)


def make_state(directory: Path) -> Path:
    """A state directory with the guest image of this host; skips the test if there is none."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed")
    images = images_directory(default_state_directory())
    if not (images / "current").exists():
        pytest.skip("no guest image: etude sandbox image build")
    (directory / "images").mkdir(parents=True)
    (directory / "images" / "vm").symlink_to(images)
    return directory


async def no_step(name: str) -> None:
    """Nothing watches."""


def with_backend(
    state: Path, scenario: Callable[[VmBackend], Awaitable[Result]], on_step: Step = no_step
) -> Result:
    """Runs a scenario on a new backend under emulation, closes it, and sees that nothing is left."""

    async def run() -> Result:
        backend = VmBackend(state, accelerator="tcg", on_step=on_step)
        try:
            result = await scenario(backend)
        finally:
            await backend.close()
        assert machines_below(os.getpid()) == []
        assert list((state / "vm").glob("*")) == []
        return result

    return asyncio.run(run())


def machines_below(owner: int) -> list[int]:
    """Process ids of QEMUs that descend from a process."""
    rows: dict[int, tuple[int, bytes]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_bytes().partition(b"(")[2].rpartition(b")")
            except OSError:
                continue
            fields = rest.split()
            if fields[0] not in (b"Z", b"X"):
                rows[int(entry.name)] = int(fields[1]), name
    return [
        pid for pid, (_, name) in rows.items() if name.startswith(b"qemu") and _descends(pid, owner, rows)
    ]


def _descends(pid: int, owner: int, rows: dict[int, tuple[int, bytes]]) -> bool:
    while pid in rows:
        pid = rows[pid][0]
        if pid == owner:
            return True
    return False
