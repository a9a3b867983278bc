"""One QEMU process: its command line, its start and end, and saving and loading of device state.

The machine has two disks (the image, read-only and shared by all; its own), a serial line to the program
inside, a random number generator, and nothing else: no network card, no shared folder. QEMU runs under its
own system-call filter, below a guard, and communicates with its owner through two inherited sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import ResourceError, SandboxError
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.guarded import GuardedProcess
from etude.sandbox.types import Resources
from etude.sandbox.vm.qmp import Event, Qmp

PROGRAM = "qemu-system-x86_64"
START_S = 60.0
STATE_S = 60.0
_KVM = Path("/dev/kvm")
_NOBODY = 65534
_FILTER = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_EMULATED_CPU = "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+rdrand"
"""The level x86-64-v2, which programs may expect today; more is slower to emulate."""
_KERNEL_BYTES = 64 << 20
"""Memory of the guest for its kernel and our program, besides that of the sandbox."""
_MIB = 1 << 20
_WRITE = os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Hardware:
    """The virtual hardware. A machine can load the state of another one only if their hardware is equal."""

    memory_bytes: int
    """A multiple of 1 KiB."""
    num_cpus: int
    disk_bytes: int
    """Size of its own disk."""
    accelerator: str
    """`kvm` or `tcg`."""

    @classmethod
    def for_resources(cls, resources: Resources, accelerator: str) -> Hardware:
        """The hardware for a sandbox with these resources."""
        memory_mib = -(-(resources.memory_bytes + _KERNEL_BYTES) // _MIB)
        disk_mib = max(8, -(-resources.disk_bytes // _MIB))
        num_cpus = max(1, -int(-resources.cpus // 1))
        return cls(memory_mib * _MIB, num_cpus, disk_mib * _MIB, accelerator)


@dataclass(frozen=True)
class Boot:
    """Boot parameters of a machine that starts without a saved state."""

    kernel: Path
    initrd: Path
    append: str
    console: Path
    """File for the kernel's messages."""


def command_line(
    hardware: Hardware,
    root: Path,
    disk: Path,
    memory: Path,
    line: int,
    control: int,
    boot: Boot | None = None,
) -> list[str]:
    """QEMU's arguments. `line` and `control` are descriptors that it inherits.

    Without `boot` the machine waits for a saved state.
    """
    is_kvm = hardware.accelerator == "kvm"
    accelerator = "kvm" if is_kvm else "tcg,tb-size=128" + (",thread=multi" if hardware.num_cpus > 1 else "")
    argv = [
        PROGRAM, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", _FILTER,
        "-machine", "q35,memory-backend=ram,usb=off,smbus=off,vmport=off,suppress-vmdesc=on",
        "-accel", accelerator,
        "-cpu", "host" if is_kvm else _EMULATED_CPU,
        "-smp", str(hardware.num_cpus),
        "-m", f"{hardware.memory_bytes >> 10}K",
        "-object", _options("memory-backend-file,id=ram,share=off,prealloc=off",
                            size=hardware.memory_bytes, mem_path=memory),
        "-global", "migration.send-configuration=off",
        "-blockdev", _options("driver=file,node-name=root,read-only=on", filename=root),
        "-device", "virtio-blk-pci,drive=root,id=root-disk",
        "-blockdev", _options("driver=file,node-name=own,cache.no-flush=on,discard=unmap", filename=disk),
        "-device", "virtio-blk-pci,drive=own,id=own-disk",
        "-device", "virtio-serial-pci,id=serial",
        "-chardev", f"socket,id=line,fd={line}",
        "-device", "virtserialport,chardev=line,name=etude,id=port",
        "-object", "rng-random,id=entropy,filename=/dev/urandom",
        "-device", "virtio-rng-pci,rng=entropy,id=rng",
        "-chardev", f"socket,id=control,fd={control}",
        "-mon", "chardev=control,mode=control",
    ]  # fmt: skip
    if boot is None:
        argv += ["-serial", "null", "-incoming", "defer", "-S"]
    else:
        argv += ["-chardev", _options("file,id=console", path=boot.console), "-serial", "chardev:console"]
        argv += ["-kernel", str(boot.kernel), "-initrd", str(boot.initrd), "-append", boot.append]
    return argv


def _options(head: str, **values: object) -> str:
    """QEMU's option syntax, in which a comma within a value is doubled."""
    rows = (f"{key.replace('_', '-')}={str(value).replace(',', ',,')}" for key, value in values.items())
    return ",".join((head, *rows))


@functools.cache
def qemu_version() -> str:
    """`7.2.22` or the like. Raises ResourceError if QEMU is missing or does not answer."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ResourceError(
            "QEMU is not installed",
            field="sandbox.backend",
            received="vm",
            fix=f"install {PROGRAM} (package qemu-system-x86)",
        )
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError(f"QEMU does not run: {error}", field="sandbox.backend", received="vm") from error
    match = re.search(r"version (\S+)", done.stdout)
    return match[1] if match else done.stdout.strip()


def unprivileged_user(accelerator: str) -> tuple[int, int] | None:
    """(uid, gid) of QEMU when this process is root; None: that of this process."""
    if os.geteuid() != 0:
        return None
    if accelerator != "kvm":
        return _NOBODY, _NOBODY
    status = _KVM.stat()
    # Access to the device requires its group.
    return (_NOBODY, status.st_gid) if status.st_gid and status.st_mode & 0o060 == 0o060 else None


def _open(
    files: list[int], path: Path, flags: int = os.O_RDONLY, user: tuple[int, int] | None = None
) -> Path:
    """Path by which QEMU can open a file through an inherited descriptor (added to `files`), without access
    to its directory. Changes the file's owner to `user`."""
    files.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
    if user is not None:
        os.fchown(files[-1], *user)
    return Path(f"/proc/self/fd/{files[-1]}")


class Qemu:
    """A running QEMU. Ends by `kill`, or when its guest panics or its owner dies."""

    def __init__(self, process: GuardedProcess, qmp: Qmp, line: socket.socket, memory: Path) -> None:
        self._process = process
        self._line: socket.socket | None = line
        self.qmp = qmp
        self.memory = memory
        """The file that is mapped privately as the guest's memory."""

    @classmethod
    async def spawn(
        cls,
        name: str,
        hardware: Hardware,
        root: Path,
        disk: Path,
        memory: Path,
        boot: Boot | None = None,
    ) -> Qemu:
        """Starts QEMU and waits until it answers on `qmp`. Raises SandboxError, with nothing left running."""
        line, inner_line = socket.socketpair()
        control, inner_control = socket.socketpair()
        user = unprivileged_user(hardware.accelerator)
        files: list[int] = []
        with inner_line, inner_control:
            ends = (inner_line.fileno(), inner_control.fileno())
            try:
                image = _open(files, root)
                own = _open(files, disk, _WRITE, user), _open(files, memory, _WRITE, user)
                if boot is not None:
                    kernel, initrd = _open(files, boot.kernel), _open(files, boot.initrd)
                    boot = Boot(kernel, initrd, boot.append, _open(files, boot.console, _WRITE, user))
                argv = command_line(hardware, image, *own, *ends, boot=boot)
                process = await GuardedProcess.spawn(argv, pass_fds=(*ends, *files), user=user)
            except BaseException:
                line.close()
                control.close()
                raise
            finally:
                for descriptor in files:
                    os.close(descriptor)
        qemu = cls(process, Qmp(control, name), line, memory)
        try:
            await qemu.qmp.negotiate(START_S)
        except SandboxError as error:
            log = process.log().strip() or error.message
            await asyncio.shield(qemu.kill())
            raise SandboxError(
                f"QEMU does not start: {log[-1000:]}", field="sandbox", received=name
            ) from error
        except BaseException:
            await asyncio.shield(qemu.kill())
            raise
        return qemu

    def detach_line(self) -> socket.socket:
        """Hands over the socket to the program inside, once; the caller closes it."""
        assert self._line is not None, "detach_line is called once"
        line, self._line = self._line, None
        return line

    @property
    def pid(self) -> int:
        """Process id of QEMU itself. Raises SandboxError if it has ended."""
        guard = self._process.pid
        try:
            children = Path(f"/proc/{guard}/task/{guard}/children").read_text(encoding="ascii").split()
            return int(children[0])
        except (OSError, IndexError) as error:
            raise SandboxError("QEMU has ended", field="sandbox", received=guard) from error

    @property
    def was_killed(self) -> bool:
        """Whether QEMU was killed by a signal, as opposed to ended by its guest."""
        return self._process.was_killed

    async def execute(self, command: str, deadline_s: float = STATE_S, /, **arguments: Any) -> Any:
        """Runs a QMP command; underscores in argument names become dashes. Raises as `Qmp.execute`."""
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        try:
            return await self.qmp.execute(command, named, deadline_s)
        except SandboxLostError as error:
            output = self._process.log().strip()[-1000:]
            if not output:
                raise
            raise SandboxLostError(
                f"{error.message}: {output}", field=error.field, received=error.received
            ) from error

    async def save_devices(self, path: Path) -> None:
        """Writes the state of processors and devices of a stopped guest, without memory and disks.

        Raises SandboxError, OSError.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            added = await self.qmp.execute("add-fd", {}, STATE_S, descriptor=descriptor)
        finally:
            os.close(descriptor)
        number = added["fdset-id"]
        try:
            await self.execute("xen-save-devices-state", filename=f"/dev/fdset/{number}", live=False)
        finally:
            if not self.qmp.closed:
                await self.execute("remove-fd", fdset_id=number)

    async def load_devices(self, path: Path) -> None:
        """Loads a saved state of processors and devices into a waiting machine, which stays stopped."""
        with path.open("rb") as file:
            await self.qmp.execute("getfd", {"fdname": "state"}, STATE_S, descriptor=file.fileno())
        await self.execute("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
        await self.execute("migrate-incoming", uri="fd:state")
        event = await self.qmp.event(_is_end_of_loading, STATE_S, "loaded state")
        if event["data"]["status"] != "completed":
            output = self._process.log()[-1000:]
            raise SandboxError(f"the state was not loaded: {output}", field="sandbox")

    async def kill(self) -> None:
        """Ends QEMU. Idempotent."""
        self.qmp.close()
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.close()
            self._line = None
        await self._process.kill()


def _is_end_of_loading(event: Event) -> bool:
    return event["event"] == "MIGRATION" and event["data"]["status"] in ("completed", "failed", "cancelled")
