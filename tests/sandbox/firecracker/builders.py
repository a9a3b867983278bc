"""A Firecracker host in a temporary directory: the fake's programs, its images, and a backend."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import pytest

from etude.sandbox.firecracker import fake, uffd
from etude.sandbox.firecracker.backend import FirecrackerBackend
from etude.sandbox.firecracker.guest_files import guest_files
from etude.sandbox.firecracker.jailer import Jail
from etude.sandbox.firecracker.setup import Setup
from etude.sandbox.types import Resources
from tests.sandbox.docker.contract import COMMAND_UID

SMALL = Resources(memory_bytes=32 << 20, disk_bytes=4 << 20)
Scenario = Callable[[FirecrackerBackend], Awaitable[None]]


def userfaultfd_works() -> bool:
    """Whether the kernel gives this process a userfaultfd."""
    try:
        os.close(uffd.new_userfaultfd())
    except OSError:
        return False
    return True


needs_userfaultfd = pytest.mark.skipif(
    not userfaultfd_works(), reason="the kernel refuses userfaultfd to this user"
)


def make_setup(
    directory: Path, memory: Literal["File", "Uffd"] = "File", jailed: bool = False, **options: object
) -> Setup:
    """The fake's programs and images below a directory."""
    program, jailer = fake.install(directory)
    (directory / "vmlinux").write_bytes(b"kernel")
    fake.write_rootfs(directory / "rootfs.tar", guest_files())
    return Setup(
        directory / "vmlinux",
        directory / "rootfs.tar",
        program,
        Jail(jailer) if jailed else None,
        memory,
        command_uid=COMMAND_UID,
        **{"format_disk": (), **options},  # type: ignore[arg-type]
    )


def play(directory: Path, scenario: Scenario, setup: Setup | None = None) -> None:
    """Runs a scenario; afterwards no working file and no process of a guest may be left."""

    async def run() -> None:
        backend = FirecrackerBackend(setup or make_setup(directory), directory / "state")
        try:
            await scenario(backend)
        finally:
            await backend.close()
        await all_processes_end(str(directory))
        work = directory / "state/firecracker"
        assert not work.exists() or list(work.iterdir()) == []

    asyncio.run(run())


async def all_processes_end(text: str) -> None:
    """Killed processes may take a moment to be gone. Raises AssertionError if one stays."""
    left = processes_about(text)
    for _ in range(3000):
        if not left:
            return
        await asyncio.sleep(0.02)
        left = processes_about(text)
    raise AssertionError(f"still alive: {left}")


def processes_about(text: str) -> list[str]:
    """Command lines of living processes, beside this one, that contain a text."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in line:
                found.append(line)
    return found
