"""Sandboxes as virtual machines: QEMU with KVM where guests boot under it, else with emulation.

A new sandbox is a copy of a warmed guest (`templates.py`), so it starts without booting. Pausing, snapshots,
forks and migration preserve memory, processes and disk (`state.py`).

    <state>/images/vm/      guest images              <state>/vm-templates/   warmed guests
    <state>/snapshots/      durable snapshots         <state>/vm/<owner>/     running machines
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from etude.errors import ConfigError, ResourceError, SandboxError
from etude.kit.leftovers import ScratchDirectory, work_directory
from etude.sandbox.channel import Channel
from etude.sandbox.errors import SnapshotError
from etude.sandbox.guest_program import install_template
from etude.sandbox.interface import Sandbox
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.machine_backend import MachineBackend, gather_copies
from etude.sandbox.snapshots import Snapshot, SnapshotDraft
from etude.sandbox.types import Capabilities, SnapshotKind
from etude.sandbox.vm.image import VmImage, find_image, images_directory
from etude.sandbox.vm.qemu import Hardware, qemu_version
from etude.sandbox.vm.state import Machine, start_machine
from etude.sandbox.vm.templates import WarmTemplates, choose_accelerator

INSTALL_S = 120.0
Step = Callable[[str], Awaitable[None]]


async def _ignore_step(name: str) -> None:
    """The default of `on_step`: does nothing."""


class VmBackend(MachineBackend):
    """Virtual machines. For one event loop."""

    name = "vm"

    def __init__(
        self,
        state: Path | None = None,
        accelerator: str | None = None,
        on_step: Step = _ignore_step,
    ) -> None:
        """`accelerator`: `kvm` or `tcg`; None: detected. `on_step` is awaited at each step of saving and
        restoring, with the step's name.
        """
        super().__init__(state)
        if accelerator not in (None, "kvm", "tcg"):
            raise ConfigError(
                "unknown accelerator", field="accelerator", received=accelerator, fix="use kvm or tcg"
            )
        self._accelerator = accelerator
        self._step = on_step
        self._templates = WarmTemplates(self.state)
        self._machines: dict[str, Machine] = {}
        self._falling_asleep: set[str] = set()
        self._image: VmImage | None = None
        self._work: ScratchDirectory | None = None
        self._preparing = asyncio.Lock()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            backend=self.name,
            isolation="vm",
            commands=True,
            network=True,
            images=False,
            neighbours_share=False,
            snapshots=frozenset({"full"}),
            pause=frozenset({"full"}),
            fork="full",
            migrate="full",
        )

    def host_failure(self, sandbox: MachineSandbox) -> str | None:
        """See MachineBackend.host_failure. A guest whose kernel panics ends QEMU without a signal."""
        machine = self._machines.get(sandbox.id)
        return "QEMU was killed" if machine is not None and machine.qemu.was_killed else None

    def doctor(self) -> list[str]:
        problems: list[str] = []
        try:
            qemu_version()
        except ResourceError as error:
            problems.append(str(error))
        if not (images_directory(self.state) / "current").exists():
            problems.append("there is no guest image; fix: etude sandbox image build")
        return problems

    # MachineBackend

    async def boot(self, sandbox: MachineSandbox) -> Channel:
        """See MachineBackend.boot: a copy of the warmed guest, with the template's files."""
        image, accelerator = await self._prepare()
        hardware = Hardware.for_resources(sandbox.spec.resources, accelerator)
        source = await self._templates.get(image, sandbox.spec.resources, hardware)
        machine = await self._start(sandbox, hardware, image, source)
        channel = Channel(machine.qemu.detach_line(), sandbox.id)
        try:
            # Sent without waiting for the greeting: both requests are answered in order.
            await asyncio.gather(
                machine.resume(channel), install_template(channel, sandbox.spec.template, INSTALL_S)
            )
        except BaseException as error:
            channel.close(f"the sandbox did not start: {error}")
            raise
        return channel

    async def stop(self, sandbox: MachineSandbox) -> None:
        machine = self._machines.pop(sandbox.id, None)
        if machine is not None:
            await machine.close()

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self._work is not None:
                self._work.close()
                self._work = None

    async def save(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        if kind != "full":
            raise self.unsupported(kind)
        machine = self._machine(sandbox)
        await self._write(sandbox, machine, draft.directory, draft.extra)

    async def restore(self, sandbox: MachineSandbox, snapshot: Snapshot) -> Channel:
        _, accelerator = await self._prepare()
        hardware = Hardware.for_resources(snapshot.spec.resources, accelerator)
        if snapshot.extra.get("hardware") != asdict(hardware):
            raise SnapshotError(
                f"the snapshot is of another machine: {snapshot.extra.get('hardware')}",
                field="snapshot",
                received=snapshot.info.id,
                fix=f"restore it where guests are {asdict(hardware)}",
            )
        image = await self._image_of(str(snapshot.extra["image"]))
        await self._step("restore: checked")
        machine = await self._start(sandbox, hardware, image, snapshot.directory)
        return await self._continue(sandbox, machine, int(snapshot.extra["next_id"]))

    async def fall_asleep(self, sandbox: MachineSandbox, mode: SnapshotKind, temporary: bool = False) -> None:
        """As MachineBackend.fall_asleep; the guest stays stopped after the copy, which loses no changes."""
        self._falling_asleep.add(sandbox.id)
        try:
            await super().fall_asleep(sandbox, mode, temporary)
        except BaseException:
            self._falling_asleep.discard(sandbox.id)
            await asyncio.shield(self._resume_guest(sandbox))
            raise
        self._falling_asleep.discard(sandbox.id)

    async def fork(self, sandbox: MachineSandbox, count: int) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. The forks share one copy of the memory; each stores its own changes apart."""
        directory = self._directory(f"fork-{secrets.token_hex(6)}")
        directory.mkdir(mode=0o700)
        extra: dict[str, object] = {}
        try:
            async with sandbox.lifecycle:
                machine = self._machine(sandbox)
                await self._write(sandbox, machine, directory, extra)
            spec = self.copied_spec(sandbox)
            self._check(spec)
            copies = [MachineSandbox(self, self.new_id(), spec) for _ in range(count)]
            return await gather_copies(
                [self.begin(copy, self._copy, machine, directory, extra) for copy in copies]
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, True)

    # Internals

    async def _prepare(self) -> tuple[VmImage, str]:
        """Image and accelerator, detected once. Raises TemplateError, ResourceError."""
        async with self._preparing:
            if self._image is None or self._accelerator is None:
                self.version = await asyncio.to_thread(qemu_version)
                image = await asyncio.to_thread(find_image, self.state)
                if self._accelerator is None:
                    self._accelerator = await choose_accelerator(self.state, image)
                self._image = image
            return self._image, self._accelerator

    async def _image_of(self, digest: str) -> VmImage:
        image, _ = await self._prepare()
        return image if image.digest == digest else await asyncio.to_thread(find_image, self.state, digest)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        self.version = qemu_version()
        super()._check_snapshot(snapshot)

    def _directory(self, name: str) -> Path:
        if self._work is None:
            self._work = work_directory(self.state / "vm")
        return self._work.path / name

    def _machine(self, sandbox: MachineSandbox) -> Machine:
        machine = self._machines.get(sandbox.id)
        if machine is None or sandbox.state != "running":
            # Raises the channel's error, which has the reason, if there is one.
            _ = sandbox.channel
            raise SandboxError("the sandbox has no machine", field="sandbox", received=sandbox.id)
        return machine

    async def _start(
        self, sandbox: MachineSandbox, hardware: Hardware, image: VmImage, source: Path
    ) -> Machine:
        directory = self._directory(f"{sandbox.id}-{secrets.token_hex(3)}")
        machine = await start_machine(sandbox.id, hardware, image, directory, source)
        self._machines[sandbox.id] = machine

        def on_end() -> None:
            if self._machines.get(sandbox.id) is machine:
                self.mark_lost(sandbox)

        machine.qemu.qmp.on_end = on_end
        return machine

    async def _continue(self, sandbox: MachineSandbox, machine: Machine, next_id: int) -> Channel:
        """Resumes a machine from a saved state. Ids start above those that it may still answer."""
        await self._step("restore: standing")
        channel = Channel(machine.qemu.detach_line(), sandbox.id, next_id)
        try:
            await machine.resume(channel)
        except BaseException as error:
            channel.close(f"the sandbox did not resume: {error}")
            raise
        return channel

    async def _copy(
        self, sandbox: MachineSandbox, origin: Machine, source: Path, extra: dict[str, object]
    ) -> Channel:
        machine = await self._start(sandbox, origin.hardware, origin.image, source)
        return await self._continue(sandbox, machine, int(str(extra["next_id"])))

    async def _write(
        self, sandbox: MachineSandbox, machine: Machine, directory: Path, extra: dict[str, object]
    ) -> None:
        """Writes the state of a running machine, and resumes it unless it is falling asleep."""
        async with sandbox.held_for_copy() as channel:
            try:
                await self._step("save: held")
                await machine.qemu.execute("stop")  # which flushes the disk into its file, too
                await self._step("save: stopped")
                await machine.write_state(directory)
                await self._step("save: written")
            except BaseException:
                with contextlib.suppress(SandboxError):
                    # The first error is the one to raise.
                    await asyncio.shield(machine.resume(channel))
                raise
            extra["next_id"] = channel.next_id()
            extra["image"] = machine.image.digest
            extra["hardware"] = asdict(machine.hardware)
            if sandbox.id not in self._falling_asleep:
                await asyncio.shield(machine.resume(channel))

    async def _resume_guest(self, sandbox: MachineSandbox) -> None:
        """Resumes a sandbox that failed to fall asleep, if its guest was stopped."""
        machine = self._machines.get(sandbox.id)
        if machine is None or sandbox.state != "running" or machine.qemu.qmp.closed:
            return
        status = await machine.qemu.execute("query-status")
        if not status["running"]:
            await machine.resume(sandbox.channel)
