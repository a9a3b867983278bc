"""A machine and its saved state: three files in a directory, written from a stopped guest.

    ram       all of its memory, sparse; machines map it privately, so that it does not change
    disk      its own disk, sparse
    devices   processors and devices, in QEMU's format

Machines do not share writable files: each gets a copy of the disk, and its changes of memory are private.

A guest's memory is a private mapping of a file (its base): unwritten pages are those of the base, shared by
all machines with the same base; written pages belong to QEMU. A copy is the base's data plus the written
pages, which `/proc/PID/pagemap` identifies. Pages of zeros stay holes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.tasks import end_tasks, finish_in_thread
from etude.sandbox.channel import Channel
from etude.sandbox.machine import greeting
from etude.sandbox.vm.image import VmImage
from etude.sandbox.vm.qemu import Hardware, Qemu

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PIECE_BYTES = 1 << 20
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_ZERO_PAGE = bytes(PAGE_BYTES)


@dataclass(frozen=True)
class Mapping:
    """A part of the guest's memory in QEMU's address space."""

    address: int
    size_bytes: int
    offset: int
    """Offset in the guest's memory, which is also that in its file."""


def make_sparse(path: Path, size_bytes: int) -> None:
    """Creates a file of zeros that takes no space."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a file with its holes; shares blocks if the file system can. Raises OSError."""
    make_sparse(target, 0)
    done = subprocess.run(
        ["cp", "--sparse=always", "--reflink=auto", source, target],
        capture_output=True,
        text=True,
        check=False,
        restore_signals=False,  # exceeding a limit of file sizes must be an error, not a signal
    )
    if done.returncode:
        raise OSError(errno.EIO, done.stderr.strip()[-500:] or f"cp ended with {done.returncode}")


def save_memory(pid: int, base: Path, target: Path) -> None:
    """Writes the memory of the stopped QEMU `pid`, whose base is `base`, into the new file `target`.

    Raises SandboxError if its memory cannot be read, OSError if `target` cannot be written.
    """
    copy_sparse(base, target)
    writer = os.open(target, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(pid, error) from error
        try:
            for mapping in find_mappings(pid, base):
                for start, end in written_ranges(pid, mapping):
                    _copy_pages(memory, mapping, start, end, writer)
        finally:
            os.close(memory)
    finally:
        os.close(writer)


def find_mappings(pid: int, base: Path) -> list[Mapping]:
    """QEMU's mappings of the guest's memory. Raises SandboxError unless they cover it."""
    status = base.stat()
    found: list[Mapping] = []
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise _unreadable(pid, error) from error
    for line in lines:
        fields = line.split(maxsplit=5)
        major, _, minor = fields[3].partition(":")
        device = os.makedev(int(major, 16), int(minor, 16))
        if (device, int(fields[4])) == (status.st_dev, status.st_ino):
            start, _, end = fields[0].partition("-")
            found.append(Mapping(int(start, 16), int(end, 16) - int(start, 16), int(fields[2], 16)))
    if sum(mapping.size_bytes for mapping in found) != status.st_size:
        raise SandboxError("the guest's memory is only partly mapped", field="sandbox", received=pid)
    return found


def written_ranges(pid: int, mapping: Mapping) -> Iterator[tuple[int, int]]:
    """(start, end) of ranges of written pages, in bytes from the mapping's start."""
    count = mapping.size_bytes // PAGE_BYTES
    entries = array("Q")
    try:
        with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as file:
            file.seek(mapping.address // PAGE_BYTES * 8)
            data = b""
            while len(data) < count * 8 and (piece := file.read(count * 8 - len(data))):
                data += piece
            entries.frombytes(data)
    except OSError as error:
        raise _unreadable(pid, error) from error
    first = -1
    for index, entry in enumerate(entries):
        written = entry & _SWAPPED or (entry & (_PRESENT | _OF_FILE)) == _PRESENT
        if written and first < 0:
            first = index
        elif not written and first >= 0:
            yield first * PAGE_BYTES, index * PAGE_BYTES
            first = -1
    if first >= 0:
        yield first * PAGE_BYTES, len(entries) * PAGE_BYTES


def _copy_pages(memory: int, mapping: Mapping, start: int, end: int, writer: int) -> None:
    """Copies pages; skips pages of zeros whose target is zeros as well, and may be a hole."""
    for piece_start in range(start, end, _PIECE_BYTES):
        wanted = min(_PIECE_BYTES, end - piece_start)
        try:
            data = os.pread(memory, wanted, mapping.address + piece_start)
        except OSError as error:
            raise SandboxError(f"the guest's memory cannot be read: {error}", field="sandbox") from error
        if len(data) != wanted:
            raise SandboxError("the guest's memory ended early", field="sandbox")
        offset = mapping.offset + piece_start
        run = 0
        for position in range(0, wanted, PAGE_BYTES):
            page = data[position : position + PAGE_BYTES]
            if page == _ZERO_PAGE == os.pread(writer, PAGE_BYTES, offset + position):
                _write(writer, data[run:position], offset + run)
                run = position + PAGE_BYTES
        _write(writer, data[run:], offset + run)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _unreadable(pid: int, error: OSError) -> SandboxError:
    return SandboxError(
        f"the memory of QEMU cannot be read: {error.strerror}",
        field="sandbox",
        received=pid,
        fix="set the sysctl kernel.yama.ptrace_scope to 0 or 1",
    )


RAM, DISK, DEVICES = "ram", "disk", "devices"
HELLO_S = 60.0


@dataclass
class Machine:
    """A running (or stopped) guest and its directory."""

    name: str
    qemu: Qemu
    hardware: Hardware
    image: VmImage
    directory: Path

    @property
    def disk(self) -> Path:
        return self.directory / DISK

    async def resume(self, channel: Channel) -> None:
        """Resumes a held machine, and greets its program. Raises SandboxError.

        The greeting is sent before the machine runs, so that the program receives it first.
        """
        message = greeting(self.name)
        message["id"] = channel.next_id()
        channel.send(message)
        answered = asyncio.ensure_future(channel.answer(message["id"], HELLO_S))
        try:
            await self.qemu.execute("cont")
            await answered
        finally:
            await end_tasks(answered)

    async def write_state(self, target: Path) -> None:
        """Writes the state of the stopped machine. Raises SandboxError, with incomplete files left."""
        try:
            await self.qemu.save_devices(target / DEVICES)
            await asyncio.gather(
                finish_in_thread(save_memory, self.qemu.pid, self.qemu.memory, target / RAM),
                finish_in_thread(copy_sparse, self.disk, target / DISK),
            )
        except OSError as error:
            raise _write_error("the state", self.name, error) from error

    async def close(self) -> None:
        """Ends the machine and removes its directory. Idempotent."""
        await self.qemu.kill()
        await asyncio.to_thread(shutil.rmtree, self.directory, True)


async def start_machine(
    name: str, hardware: Hardware, image: VmImage, directory: Path, source: Path
) -> Machine:
    """Starts a machine with the state in `source`, stopped until `resume`; its files are in `directory`.

    Raises SandboxError, with neither process nor directory left.
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
            raise _write_error("the machine's files", name, error) from error
        raise
    return Machine(name, qemu, hardware, image, directory)


def _make_files(directory: Path, source: Path) -> None:
    directory.mkdir(mode=0o700)
    copy_sparse(source / DISK, directory / DISK)
    try:
        # A hard link: the state may be deleted while the machine still maps its memory.
        os.link(source / RAM, directory / RAM)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        copy_sparse(source / RAM, directory / RAM)


def _write_error(what: str, name: str, error: OSError) -> SandboxError:
    return SandboxError(
        f"{what} cannot be written: {error.strerror}", field="sandbox", received=name, fix="free disk space"
    )
