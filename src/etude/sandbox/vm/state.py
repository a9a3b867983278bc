"""A machine and its state: three files of one directory, written from a stopped guest and started from.

    ram       all of its memory, sparse; machines map it privately, so it stays as it is
    disk      its own disk, sparse
    devices   processors and devices, in QEMU's format

No file is ever written by two machines: each gets a copy of the disk, and memory that it changes is its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.tasks import end_tasks, finish_in_thread
from etude.sandbox.channel import Channel
from etude.sandbox.machine import greeting
from etude.sandbox.vm.image import VmImage
from etude.sandbox.vm.memory import copy_sparse, save_memory
from etude.sandbox.vm.qemu import Hardware, Qemu

RAM, DISK, DEVICES = "ram", "disk", "devices"
HELLO_S = 60.0


@dataclass
class Machine:
    """A running (or stopped) guest and the directory that is its own."""

    name: str
    qemu: Qemu
    hardware: Hardware
    image: VmImage
    directory: Path

    @property
    def disk(self) -> Path:
        return self.directory / DISK

    async def wake(self, channel: Channel) -> None:
        """Lets a held machine go on, and greets its program. Raises SandboxError.

        The greeting waits for the machine on its line, so that nothing else is heard before it.
        """
        words = greeting(self.name)
        words["id"] = channel.next_id()
        channel.send(words)
        answered = asyncio.ensure_future(channel.answer(words["id"], HELLO_S))
        try:
            await self.qemu.execute("cont")
            await answered
        finally:
            await end_tasks(answered)

    async def write_state(self, target: Path) -> None:
        """Writes the state of the stopped machine. Raises SandboxError; what was written so far stays."""
        try:
            await self.qemu.save_devices(target / DEVICES)
            await asyncio.gather(
                finish_in_thread(save_memory, self.qemu.pid, self.qemu.memory, target / RAM),
                finish_in_thread(copy_sparse, self.disk, target / DISK),
            )
        except OSError as error:
            raise _no_room("the state", self.name, error) from error

    async def close(self) -> None:
        """Ends the machine and removes its directory. Idempotent."""
        await self.qemu.kill()
        await asyncio.to_thread(shutil.rmtree, self.directory, True)


async def start_machine(
    name: str, hardware: Hardware, image: VmImage, directory: Path, source: Path
) -> Machine:
    """A machine of the state in `source`, which stands still until it is woken; its files go to `directory`.

    Raises SandboxError; then neither process nor directory is left.
    """
    qemu: Qemu | None = None
    try:
        await finish_in_thread(_make_files, directory, source)
        qemu = await Qemu.spawn(name, hardware, image.root, directory / DISK, directory / RAM)
        await qemu.load_devices(source / DEVICES)
    except BaseException as error:
        if qemu is not None:
            await asyncio.shield(qemu.kill())
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            raise _no_room("the machine's files", name, error) from error
        raise
    return Machine(name, qemu, hardware, image, directory)


def _make_files(directory: Path, source: Path) -> None:
    directory.mkdir(mode=0o700)
    copy_sparse(source / DISK, directory / DISK)
    try:
        # A name of its own: the state may be deleted while the machine still maps its memory.
        os.link(source / RAM, directory / RAM)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        copy_sparse(source / RAM, directory / RAM)


def _no_room(what: str, name: str, error: OSError) -> SandboxError:
    return SandboxError(
        f"{what} cannot be written: {error.strerror}", field="sandbox", received=name, fix="free disk space"
    )
