"""The `gvisor` backend: each sandbox on a gVisor kernel of its own (runsc, systrap), as root or a plain user.

The program inside is the container's first process and communicates over standard input and output; `runsc
exec` is never used, because its processes do not survive a restore. A checkpoint leaves the sandbox running;
between `hold` and `hello` it sends nothing, so that the stream of a copy starts cleanly. Copies get entropy
and the clock from the host, and a hostname and machine id of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.leftovers import ScratchDirectory, work_directory
from etude.sandbox.channel import READY, Channel
from etude.sandbox.errors import SandboxLostError, SnapshotError
from etude.sandbox.guest_program import install_template
from etude.sandbox.gvisor.bundle import Interpreter, build_rootfs
from etude.sandbox.gvisor.container import IMAGE_FILES, OVERHEAD_BYTES, Container
from etude.sandbox.gvisor.runsc import Runsc, find_problems
from etude.sandbox.inside.rights import NOBODY
from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.machine import MachineSandbox, greeting
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.snapshots import Snapshot, SnapshotDraft, Spec
from etude.sandbox.types import Capabilities, SnapshotKind


class GvisorBackend(MachineBackend):
    """Sandboxes under gVisor, with checkpoint, restore and fork of memory and processes."""

    name = "gvisor"
    start_s = 60.0
    """Deadline of a start, and of each answer of the program inside during it."""
    checkpoint_s = 120.0
    restore_s = 120.0

    def __init__(self, state: Path | None = None, program: str = "runsc") -> None:
        """`program`: runsc's name or path."""
        super().__init__(state)
        self._program = program
        self._interpreter = Interpreter.of_this_process()
        self._work: ScratchDirectory | None = None
        self._groups: ControlGroups | None = None
        self._preparing: asyncio.Future[Runsc] | None = None
        self._numbers = itertools.count(1)
        self._containers: dict[str, Container] = {}

    def capabilities(self) -> Capabilities:
        full: frozenset[SnapshotKind] = frozenset({"full"})
        return Capabilities(
            backend=self.name,
            isolation="gvisor",
            commands=True,
            network=True,
            images=False,
            neighbours_share=False,
            snapshots=full,
            pause=full,
            fork="full",
            migrate=None,
        )

    def doctor(self) -> list[str]:
        return find_problems(self._program)

    def agents_doing(self, sandbox: MachineSandbox) -> str | None:
        container = self._containers.get(sandbox.id)
        if container is None:
            return None
        if container.end_reason:
            return container.end_reason
        return "the agent's processes used up the sandbox's memory" if container.num_oom_kills else None

    def host_failure(self, sandbox: MachineSandbox) -> str | None:
        container = self._containers.get(sandbox.id)
        if container is None or self.agents_doing(sandbox) is not None:
            return None
        return "runsc was killed" if container.was_killed else None

    async def start(
        self, spec: Spec, timeout_s: float | None = None, snapshot: Snapshot | None = None
    ) -> MachineSandbox:
        if not self._closed:
            await self._prepare()
        return await super().start(spec, timeout_s, snapshot)

    async def boot(self, sandbox: MachineSandbox) -> Channel:
        container = await self._new_container(sandbox)
        async with self._beginning(sandbox, container, "start", [], READY + 1) as channel:
            await channel.answer(READY, self.start_s)
            await install_template(channel, sandbox.spec.template, self.start_s)
            await _greet(channel, sandbox, self.start_s)
        return channel

    async def restore(self, sandbox: MachineSandbox, snapshot: Snapshot) -> Channel:
        image = [snapshot.file(name) for name in IMAGE_FILES]
        container = await self._new_container(sandbox)
        # Answers to requests from before the checkpoint arrive here as well, and are ignored.
        first_id = snapshot.extra.get("next_id", READY + 1)
        async with self._beginning(sandbox, container, "wake", image, first_id) as channel:
            await _greet(channel, sandbox, self.restore_s)
        return channel

    @asynccontextmanager
    async def _beginning(
        self, sandbox: MachineSandbox, container: Container, what: str, image: list[Path], first_id: int
    ) -> AsyncIterator[Channel]:
        """Starts a container, and watches it after the block; after a failure `stop` frees it."""
        channel = None
        try:
            channel = await container.start(sandbox.spec.resources, sandbox.id, image, first_id)
            yield channel
        except SandboxError as error:
            if channel is not None:
                channel.close("the start failed")
            raise await _with_log(error, container, what) from error
        except BaseException:
            if channel is not None:
                channel.close("the start was given up")
            raise

        def on_end() -> None:
            if self._containers.get(sandbox.id) is container:
                self.mark_lost(sandbox)

        container.watch(sandbox.spec.resources, channel, on_end)

    async def save(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        if kind != "full":
            raise self.unsupported(kind)
        container = self._containers[sandbox.id]
        async with sandbox.held_for_copy() as channel:
            try:
                await container.checkpoint(draft.directory, self.checkpoint_s)
            finally:
                if not channel.closed:
                    await asyncio.shield(_greet(channel, sandbox, self.start_s))
            draft.extra["next_id"] = channel.next_id()

    async def stop(self, sandbox: MachineSandbox) -> None:
        container = self._containers.pop(sandbox.id, None)
        if container is not None:
            await container.end()

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self._preparing is not None:
                await asyncio.wait([self._preparing])
            if self._work is not None:
                await asyncio.to_thread(self._work.close)
            if self._groups is not None:
                await asyncio.to_thread(self._groups.close)

    async def _prepare(self) -> tuple[Path, Runsc]:
        """Finds runsc and creates what all containers share, once. Raises ResourceError."""
        if self._preparing is None or (self._preparing.done() and self._work is None):
            self._preparing = asyncio.ensure_future(asyncio.to_thread(self._make_work))
        # Shielded: a cancelled caller must not leave an unknown directory.
        runsc = await asyncio.shield(self._preparing)
        assert self._work is not None, "set by _make_work, which has ended"
        return self._work.path, runsc

    def _make_work(self) -> Runsc:
        runsc = Runsc.find(self._program)
        self.version = runsc.version
        work = work_directory(self.state / "gvisor")
        rootfs = work.path / "rootfs"
        build_rootfs(rootfs, self._interpreter)
        if os.geteuid() == 0:
            for path in (rootfs, *rootfs.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        self._groups = ControlGroups.open(kernel_bytes=OVERHEAD_BYTES)
        self._work = work
        return runsc

    async def _new_container(self, sandbox: MachineSandbox) -> Container:
        work, runsc = await self._prepare()
        name = f"{sandbox.id}-{next(self._numbers)}"
        container = Container(name, work / name, runsc, self._interpreter, work / "rootfs", self._groups)
        self._containers[sandbox.id] = container
        return container


async def _greet(channel: Channel, sandbox: MachineSandbox, deadline_s: float) -> None:
    """Sends the guest its identity and fresh entropy; ends a hold."""
    await channel.request(greeting(sandbox.id), b"", deadline_s)


async def _with_log(error: SandboxError, container: Container, what: str) -> SandboxError:
    log = " ".join((await container.last_output()).replace("\0", "").split())
    if isinstance(error, (SnapshotError, SandboxLostError)) or not log:
        return error
    return SandboxError(
        f"the container did not {what}: {error.message}; runsc says: {log[-1000:]}",
        field=error.field,
        received=error.received,
        fix="run `etude sandbox doctor` for a diagnosis",
    )
