"""How microVMs are made on this host: programs, images, and whether they are there."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from etude.errors import ResourceError, SandboxError
from etude.sandbox.errors import TemplateError
from etude.sandbox.firecracker import uffd
from etude.sandbox.firecracker.guest_files import COMMAND_UID
from etude.sandbox.firecracker.jailer import Jail

_VERSION_S = 30.0


@dataclass(frozen=True)
class Setup:
    """How microVMs are made on this host."""

    kernel: Path
    """An uncompressed kernel with virtio-mmio, virtio-blk, virtio-vsock, virtio-rng, ext4 and overlayfs."""
    rootfs: Path
    """A root file system with Python 3.9 or newer, a shell and `guest_files()`; shared, read-only."""
    firecracker: Path = Path("/usr/bin/firecracker")
    jail: Jail | None = field(default_factory=Jail)
    """None: no jailer, for trying things out as a plain user with access to `/dev/kvm`."""
    memory: Literal["File", "Uffd"] = "File"
    """Who brings a restored guest's memory in: the kernel, by mapping the file, or our page-fault handler."""
    boot_args: str = ""
    """More for the guest kernel's command line."""
    command_uid: int | None = COMMAND_UID
    format_disk: tuple[str, ...] = ("mke2fs", "-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=1")
    """Puts a file system on a scratch disk, whose path is added. Empty: disks stay blank."""

    def problems(self) -> list[str]:
        """What is missing on this host, each with its mend."""
        problems = list[str]()
        programs = {"firecracker.firecracker": self.firecracker}
        if self.jail is not None:
            programs["firecracker.jail.program"] = self.jail.program
            if os.geteuid() != 0:
                problems.append("the jailer needs root: run as root, or set firecracker.jail to none")
        for key, program in programs.items():
            if not os.access(program, os.X_OK):
                problems.append(f"no program at {program}: install Firecracker's release and set {key}")
        for key, image in (("kernel", self.kernel), ("rootfs", self.rootfs)):
            if not image.is_file():
                problems.append(f"no guest image at {image}: build it and set firecracker.{key}")
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            problems.append("/dev/kvm cannot be opened: use a host with KVM and give this user access to it")
        if self.memory == "Uffd":
            problems += _userfaultfd_problems()
        if self.format_disk and shutil.which(self.format_disk[0]) is None:
            problems.append(f"{self.format_disk[0]} is missing: install e2fsprogs")
        return problems

    def check_images(self) -> None:
        """Raises TemplateError for a guest image that is not there."""
        for key, image in (("kernel", self.kernel), ("rootfs", self.rootfs)):
            if not image.is_file():
                raise TemplateError(
                    "no such guest image",
                    field=f"firecracker.{key}",
                    received=str(image),
                    fix="build it: see docs/adapters.md",
                )

    def digests(self) -> tuple[str, str]:
        """SHA-256 of kernel and root file system."""
        return _digest(self.kernel), _digest(self.rootfs)


async def program_release(program: Path) -> tuple[int, ...]:
    """The program's version. Raises ResourceError."""
    try:
        said = await run_program([str(program), "--version"], _VERSION_S)
    except SandboxError as error:
        raise ResourceError(
            f"firecracker does not run: {error.message}",
            field="firecracker.firecracker",
            received=str(program),
            fix="install Firecracker's release for this machine",
        ) from error
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", said)
    if match is None:
        raise ResourceError(
            f"no version in what it says: {said[:100]!r}",
            field="firecracker.firecracker",
            received=str(program),
            fix="name the program of Firecracker's release",
        )
    return tuple(int(part) for part in match.groups())


async def run_program(argv: list[str], deadline_s: float) -> str:
    """Runs a small program to its end: what it printed. Raises SandboxError."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        raise SandboxError(f"cannot start: {error}", field="program", received=argv[0]) from error
    try:
        async with asyncio.timeout(deadline_s):
            said, _ = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise SandboxError(
                f"not done within {deadline_s:g} s", field="program", received=argv[0]
            ) from error
        raise
    if process.returncode:
        text = said.decode(errors="replace").strip()[-500:]
        raise SandboxError(f"exit code {process.returncode}: {text}", field="program", received=argv[0])
    return said.decode(errors="replace")


def _userfaultfd_problems() -> list[str]:
    try:
        os.close(uffd.new_userfaultfd())
    except OSError as error:
        return [
            f"userfaultfd is refused ({error}): give access to /dev/userfaultfd, "
            "or sysctl -w vm.unprivileged_userfaultfd=1"
        ]
    return []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
