"""Sandboxes in Firecracker microVMs: full snapshots, the second and later ones as diffs, copies on demand.

    boot      machine-config, boot-source, drives, vsock, entropy, InstanceStart; the relay answers on vsock
    save      hold; pause; Full, or Diff laid over the last one; copy the scratch disk; resume; hello
    restore   a new process; snapshot/load (memory by File or Uffd), resumed; a new vsock connection; hello

The vsock connection breaks at every snapshot: `MicroVm.line` bridges that. Each copy is told its own
time, entropy and name in `hello`: Firecracker itself gives all copies the same.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox.channel import READY, Channel
from etude.sandbox.errors import SnapshotError
from etude.sandbox.firecracker import jailer
from etude.sandbox.firecracker.guest_files import boot_arguments
from etude.sandbox.firecracker.jailer import KERNEL, MEMORY, ROOT_DISK, SCRATCH_DISK, STATE, VSOCK, Cell
from etude.sandbox.firecracker.machine import MicroVm
from etude.sandbox.firecracker.memory import copy_sparse, merge_diff
from etude.sandbox.firecracker.setup import Setup, program_release, run_program
from etude.sandbox.installing import install_template
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.machine import MachineSandbox, Spec, greeting
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.reaping import WorkDirectory
from etude.sandbox.snapshots import Snapshot, SnapshotDraft
from etude.sandbox.types import Capabilities, SnapshotKind

BOOT_S = 60.0
GREET_S = 30.0
GUEST_CID = 3
MIN_MEMORY_MIB = 128
_DIFF = "diff"
_FORMAT_S = 30.0
_TRACKING_SINCE = (1, 13)


class FirecrackerBackend(MachineBackend):
    """Sandboxes in microVMs. For hosts with KVM; see `doctor`."""

    name = "firecracker"

    def __init__(self, setup: Setup, state: Path | None = None) -> None:
        """Nothing is started yet. Hard links are used if the images lie on the file system of `state`."""
        super().__init__(state)
        self.setup = setup
        self._work: WorkDirectory | None = None
        self._machines: dict[str, MicroVm] = {}
        self._release: tuple[int, ...] | None = None
        self._images: dict[str, str] | None = None
        self._preparing = asyncio.Lock()

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities."""
        return Capabilities(
            backend=self.name,
            isolation="vm",
            commands=True,
            network=True,
            images=False,
            snapshots=frozenset({"full"}),
            pause=frozenset({"full"}),
            fork="full",
            migrate=None,
        )

    def doctor(self) -> list[str]:
        """See SandboxBackend.doctor."""
        return self.setup.problems()

    async def start(
        self, spec: Spec, timeout_s: float | None = None, snapshot: Snapshot | None = None
    ) -> MachineSandbox:
        """See MachineBackend.start."""
        await self._prepare()
        return await super().start(spec, timeout_s, snapshot)

    async def close(self) -> None:
        """See SandboxBackend.close."""
        try:
            await super().close()
        finally:
            if self._work is not None:
                await asyncio.to_thread(self._work.close)
                self._work = None

    async def migrate(self, sandbox: MachineSandbox, target: SandboxBackend) -> Sandbox:
        """Not offered: Firecracker has no live migration. Export a full snapshot to an equal host instead."""
        raise self.unsupported("migrate")

    # The life of a machine

    async def boot(self, sandbox: MachineSandbox) -> Channel:
        """See MachineBackend.boot."""
        machine = self._new_machine(sandbox)
        spec, cell, api = sandbox.spec, machine.cell, machine.api
        await asyncio.to_thread(self._furnish, cell)
        await self._make_scratch(cell, spec.resources.disk_bytes)
        await machine.launch(spec.resources)
        memory_mib = max(MIN_MEMORY_MIB, math.ceil(spec.resources.memory_bytes / (1 << 20)))
        await api.put_machine(max(1, math.ceil(spec.resources.cpus)), memory_mib, track_dirty_pages=True)
        setup, template = self.setup, spec.template
        arguments = boot_arguments(template.workspace, spec.resources, setup.command_uid, setup.boot_args)
        await api.put_boot_source(KERNEL, arguments)
        await api.put_drive("rootfs", ROOT_DISK, root=True, read_only=True)
        await api.put_drive("scratch", SCRATCH_DISK, root=False, read_only=False)
        await api.put_vsock(GUEST_CID, VSOCK)
        await api.put_entropy()
        await api.start()
        channel = Channel(machine.line.socket, sandbox.id)
        try:
            await machine.connect(BOOT_S)
            await channel.answer(READY, BOOT_S)
            await channel.request(greeting(sandbox.id), b"", GREET_S)
            await install_template(channel, template, GREET_S)
            machine.check()
        except BaseException:
            channel.close("the guest never ran")
            raise
        return channel

    async def restore(self, sandbox: MachineSandbox, snapshot: Snapshot) -> Channel:
        """See MachineBackend.restore."""
        await self._prepare()
        if snapshot.extra.get("images") != self._images:
            raise SnapshotError(
                "it was made with another kernel or root file system",
                field="snapshot",
                received=snapshot.info.id,
                fix="configure the images with which it was made",
            )
        machine = self._new_machine(sandbox)
        cell = machine.cell
        await asyncio.to_thread(self._furnish, cell, snapshot)
        await machine.launch(sandbox.spec.resources)
        path = MEMORY
        if self.setup.memory == "Uffd":
            await machine.serve_pages(cell.path(MEMORY))
            path = jailer.PAGE_SOCKET
        tracking = "track_dirty_pages" if self._release_at_least(_TRACKING_SINCE) else "enable_diff_snapshots"
        try:
            await machine.api.load_snapshot(
                STATE, self.setup.memory, path, resume=True, track_dirty_pages=True, tracking_field=tracking
            )
        except SandboxError as error:
            raise SnapshotError(
                f"firecracker does not load it: {error.message}; {machine.log()}",
                field="snapshot",
                received=snapshot.info.id,
                fix="restore it on a host like the one that made it",
            ) from error
        machine.base = cell.path(MEMORY)
        # What the source was asked before the snapshot is answered here too, to nobody.
        channel = Channel(machine.line.socket, sandbox.id, snapshot.extra.get("next_id", READY + 1))
        try:
            await machine.connect(GREET_S)
            await channel.request(greeting(sandbox.id), b"", GREET_S)
            machine.check()
        except BaseException:
            channel.close("the guest did not wake")
            raise
        return channel

    async def save(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        """See MachineBackend.save. The guest stands still while the diff and the disk are written."""
        if kind != "full":
            raise self.unsupported(kind)
        machine = self._machines[sandbox.id]
        base, machine.base = machine.base, None
        cell = machine.cell
        names = (STATE, MEMORY if base is None else _DIFF)
        made = [f"new-{name}" for name in names]
        try:
            async with sandbox.held() as channel:
                next_id = channel.next_id()
                await machine.line.suspend()
                try:
                    await machine.api.pause()
                    await machine.api.create_snapshot("Full" if base is None else "Diff", made[0], made[1])
                    await asyncio.to_thread(
                        copy_sparse, cell.path(SCRATCH_DISK), draft.directory / SCRATCH_DISK
                    )
                finally:
                    await asyncio.shield(self._go_on(sandbox, machine, channel))
            await asyncio.to_thread(_collect, cell, made, base, draft.directory)
            machine.base = await asyncio.to_thread(self._new_base, cell, draft)
        except OSError as error:
            raise SnapshotError(
                f"the snapshot could not be written: {error}",
                field="snapshot",
                received=draft.id,
                fix="free disk space",
            ) from error
        finally:
            for name in made:
                cell.path(name).unlink(missing_ok=True)
        draft.extra |= {"images": self._images, "firecracker": list(self._release or ()), "next_id": next_id}

    async def stop(self, sandbox: MachineSandbox) -> None:
        """See MachineBackend.stop."""
        machine = self._machines.pop(sandbox.id, None)
        if machine is not None:
            await machine.close()

    # Inner workings

    async def _go_on(self, sandbox: MachineSandbox, machine: MicroVm, channel: Channel) -> None:
        """Wakes a paused guest and takes its line up again. A guest that does not wake is lost."""
        try:
            await machine.api.resume()
            await machine.connect(GREET_S)
            await channel.request(greeting(sandbox.id), b"", GREET_S)
        except BaseException:
            self.lost(sandbox)
            raise

    async def _prepare(self) -> None:
        """Once: the work directory, Firecracker's version, the images' digests. Raises UserError."""
        async with self._preparing:
            if self._images is not None:
                return
            self.setup.check_images()
            self._release = await program_release(self.setup.firecracker)
            self.version = "1:" + ".".join(map(str, self._release))
            kernel, rootfs = await asyncio.to_thread(self.setup.digests)
            self._work = await asyncio.to_thread(WorkDirectory, self.state / self.name)
            self._images = {KERNEL: kernel, ROOT_DISK: rootfs}

    def _release_at_least(self, release: tuple[int, ...]) -> bool:
        return self._release is not None and self._release >= release

    def _new_machine(self, sandbox: MachineSandbox) -> MicroVm:
        assert self._work is not None, "it is prepared"
        cell = Cell(self._work.path, sandbox.id, self.setup.firecracker, self.setup.jail)
        machine = MicroVm(cell, lambda reason: self.lost(sandbox))
        self._machines[sandbox.id] = machine
        return machine

    def _furnish(self, cell: Cell, snapshot: Snapshot | None = None) -> None:
        """Puts the files in that a machine needs. Runs in a thread."""
        cell.make()
        cell.place(self.setup.rootfs, ROOT_DISK)
        if snapshot is None:
            cell.place(self.setup.kernel, KERNEL)
            return
        cell.place(snapshot.file(STATE), STATE)
        cell.place(snapshot.file(MEMORY), MEMORY)
        cell.place_copy(snapshot.file(SCRATCH_DISK), SCRATCH_DISK)

    async def _make_scratch(self, cell: Cell, size_bytes: int) -> None:
        """The sandbox's own disk: a sparse file with a file system. Raises SandboxError, ResourceError."""
        path = cell.path(SCRATCH_DISK)
        with path.open("xb") as file:
            file.truncate(size_bytes)
        if self.setup.format_disk:
            await run_program([*self.setup.format_disk, str(path)], _FORMAT_S)
        cell.own(SCRATCH_DISK)

    def _new_base(self, cell: Cell, draft: SnapshotDraft) -> Path:
        """Another name for the draft's memory, to lay the next diff over: it outlives the snapshot."""
        base = cell.path(f"base-{draft.id}")
        for old in cell.root.glob("base-*"):
            old.unlink()
        jailer.link_or_copy(draft.directory / MEMORY, base)
        return base


def _collect(cell: Cell, made: list[str], base: Path | None, directory: Path) -> None:
    """Moves what Firecracker wrote into the draft, a diff laid over a copy of its base."""
    if base is None:
        _move(cell.path(made[1]), directory / MEMORY)
    else:
        copy_sparse(base, directory / MEMORY)
        merge_diff(directory / MEMORY, cell.path(made[1]))
    _move(cell.path(made[0]), directory / STATE)
    for name in (STATE, MEMORY, SCRATCH_DISK):
        # Jailed processes share a user: none may own, and so change, what others restore from.
        if os.geteuid() == 0:
            os.chown(directory / name, 0, 0)
        (directory / name).chmod(0o444)


def _move(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy_sparse(source, target)
