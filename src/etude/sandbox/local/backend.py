"""Backends over a fork server: sandboxes in namespaces, or (the base class) as plain processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.tasks import Tasks
from etude.sandbox.channel import READY, Channel
from etude.sandbox.errors import SnapshotError
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.local.host_ids import find_host_ids
from etude.sandbox.local.host_view import HostView
from etude.sandbox.local.spares import NUM_SPARES, ForkServer, SparePool
from etude.sandbox.local.templates import TemplateUses, pack_files, plan_request
from etude.sandbox.machine import OPERATION_S, MachineSandbox
from etude.sandbox.machine_backend import MachineBackend, gather_copies
from etude.sandbox.snapshots import Snapshot, SnapshotDraft
from etude.sandbox.types import Capabilities, SnapshotKind

CREATE_S = 60.0
REMOVAL_RETRY_S = 0.05
"""Between two attempts to remove groups that the kernel still holds."""
MAX_LAYERS = 8
"""Most layers below one sandbox; more are merged: each costs look-ups, and the kernel allows about 150."""
_PARTS = ("root", "tmp")


@dataclass(frozen=True)
class Clone:
    """A sandbox's record on the side of the fork server."""

    number: int
    layers: tuple[str, ...]
    """Saved layers below it, uppermost first."""
    server: ForkServer
    group: str
    """Name of its control groups."""


class ForkServerBackend(MachineBackend):
    """Clones sandboxes from one fork server, which starts with the first sandbox.

    The fork server and all its descendants end with `close()`, or with this process, however it ends.
    Forks of a sandbox share one layer with the changes of the original, made once for all of them.
    """

    has_whole_layers = False
    """Whether a saved layer contains all files, not only the changes."""
    home = "/tmp"
    """HOME of commands that run in a directory of the host."""
    works_in_directories = True
    num_spares = NUM_SPARES
    """Number of spare processes that wait in control groups of their own for a sandbox."""

    def __init__(self, state: Path | None = None, images: Path | None = None) -> None:
        """`images`: directory of the layer store; images of templates consist of its layers."""
        super().__init__(state)
        self._images = images
        self._server: ForkServer | None = None
        self._spares: SparePool | None = None
        self._starting: asyncio.Task[ForkServer] | None = None
        self._numbers = itertools.count(1)
        self._clones: dict[str, Clone] = {}
        self._templates = TemplateUses()
        self._layer_uses: Counter[str] = Counter()
        self._groups: ControlGroups | None = None
        self._removals = Tasks()
        self._removing = asyncio.Lock()

    @property
    def launcher_pid(self) -> int | None:
        """Process id of the fork server's parent; None before the first sandbox and after `close`."""
        return None if self._server is None else self._server.pid

    def capabilities(self) -> Capabilities:
        return Capabilities(
            backend=self.name,
            isolation="namespaces",
            commands=True,
            network=True,
            images=self._images is not None,
            snapshots=frozenset({"filesystem"}),
            pause=frozenset({"filesystem"}),
            fork="filesystem",
            migrate="filesystem",
        )

    async def boot(self, sandbox: MachineSandbox) -> Channel:
        return await self._clone(sandbox, ())

    def agents_doing(self, sandbox: MachineSandbox) -> str | None:
        clone = self._clones.get(sandbox.id)
        if clone is None or self._groups is None or self.host_failure(sandbox) is not None:
            # The end of the fork server ends every sandbox: not the agent's doing.
            return None
        if self._groups.num_killed_for_memory(clone.group):
            return "the agent's processes used up the sandbox's memory"
        return None

    def host_failure(self, sandbox: MachineSandbox) -> str | None:
        clone = self._clones.get(sandbox.id)
        if clone is None or not clone.server.alive:
            return "the fork server has ended"
        if self._groups is not None and self._groups.was_killed_below_limit(clone.group):
            return "the host's memory was used up"
        return None

    async def stop(self, sandbox: MachineSandbox) -> None:
        clone = self._clones.pop(sandbox.id, None)
        if clone is None:
            return
        if clone.server is self._server:
            with contextlib.suppress(SandboxError):
                # A fork server that has ended has ended every sandbox.
                self._kill_clone(clone)
        if self._groups is not None:
            self._remove_group(self._groups, clone.group)
        if clone.server is self._server:
            for digest in self._templates.release(sandbox.spec.template):
                self._delete_stored("templates", digest)
            self._release_layers(clone.layers)

    async def fork(self, sandbox: MachineSandbox, count: int) -> list[Sandbox | SandboxError]:
        async with sandbox.lifecycle:
            layers = await self._save_layer(sandbox)
        try:
            spec = self.copied_spec(sandbox)
            copies = [MachineSandbox(self, self.new_id(), spec) for _ in range(count)]
            return await gather_copies([self.begin(copy, self._clone, layers) for copy in copies])
        finally:
            self._release_layers(layers)

    async def save(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        layers = await self._save_layer(sandbox)
        try:
            for index, layer in enumerate(layers):
                for part in _PARTS:
                    await self._copy_part("pack", layer, draft.directory / f"layer-{index}-{part}.tar", part)
            draft.extra["num_layers"] = len(layers)
        finally:
            self._release_layers(layers)

    async def restore(self, sandbox: MachineSandbox, snapshot: Snapshot) -> Channel:
        await self._ensure_started()
        layers = tuple(self._new_layer() for _ in range(snapshot.extra["num_layers"]))
        self._layer_uses.update(layers)
        try:
            for index, layer in enumerate(layers):
                for part in _PARTS:
                    await self._copy_part("unpack", layer, snapshot.file(f"layer-{index}-{part}.tar"), part)
            return await self._clone(sandbox, layers)
        finally:
            self._release_layers(layers)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self._end_fork_server()

    async def _end_fork_server(self) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])
        server, self._server = self._server, None
        spares, self._spares = self._spares, None
        if spares is not None:
            await spares.close()
        if server is not None:
            await server.close()
        self._removals.cancel()
        groups, self._groups = self._groups, None
        if groups is not None:
            await asyncio.to_thread(groups.close)

    # Overridden by the kinds of fork server

    def _arguments(self) -> Sequence[str]:
        """Arguments of the fork server: isolation, directory of image layers, view of the host, spare ids."""
        raise NotImplementedError

    def _interpreter(self) -> str:
        return sys.executable

    def _open_groups(self) -> ControlGroups | None:
        return None

    def _kill_clone(self, clone: Clone) -> None:
        """Kills a sandbox's first process, and thereby all others."""
        self._send(clone.server, {"op": "kill", "id": clone.number})

    # Clones

    async def _ensure_started(self) -> ForkServer:
        """Returns the fork server, started if need be. The start continues if the caller is cancelled."""
        self.check_accepting()
        if self._server is not None:
            return self._server
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> ForkServer:
        try:
            if self._groups is None:
                self._groups = self._open_groups()
            how = (self._interpreter(), self._arguments(), self.name, self._groups)
            self._server = server = await asyncio.to_thread(ForkServer.start, *how)
            self._spares = self._new_spares(server, self._groups)
            self._spares.top_up()
            return server
        finally:
            self._starting = None

    def _send(self, server: ForkServer, request: dict[str, object], *descriptors: int) -> None:
        """Sends a request. Raises SandboxError once the fork server has ended; the next call starts one."""
        try:
            server.send(request, *descriptors)
        except SandboxError:
            if server is self._server:
                spares, self._server, self._spares = self._spares, None, None
                self._templates.clear()
                self._layer_uses.clear()
                if spares is not None:
                    self.spawn(spares.close())
                self.spawn(server.close())
            raise

    def _new_spares(self, server: ForkServer, groups: ControlGroups | None) -> SparePool:
        remove = partial(self._remove_group, groups) if groups is not None else None
        return SparePool(partial(self._send, server), groups, remove, self._numbers, self.num_spares)

    async def _clone(self, sandbox: MachineSandbox, layers: tuple[str, ...]) -> Channel:
        server = await self._ensure_started()
        assert self._spares is not None, "the spare pool starts with the fork server"
        spares = self._spares
        spare = await spares.acquire()
        if server is not self._server:
            spares.drop(spare)
            raise SandboxError("the fork server has ended", field="sandbox", received=sandbox.id)
        channel = spare.channel
        channel.name = sandbox.id
        clone = self._clones[sandbox.id] = Clone(spare.number, layers, server, spare.group)
        self._layer_uses.update(layers)
        new = self._templates.acquire(sandbox.spec.template)
        try:
            if self._groups is not None:
                self._groups.limit(spare.group, sandbox.spec.resources)
            self._send_plan(clone, sandbox, new)
            await channel.answer(READY, CREATE_S)
        except BaseException as error:
            channel.close("the sandbox was never ready")
            if new:
                # The template may have caused the failure: the next sandbox sends it again.
                self._templates.mark_missing(sandbox.spec.template)
            if isinstance(error, OSError):
                raise SandboxError(
                    f"no control group: {error}", field="sandbox", received=sandbox.id
                ) from error
            raise
        spares.top_up()
        return channel

    def _remove_group(self, groups: ControlGroups, name: str) -> None:
        """Removes a sandbox's groups in the background, as soon as the kernel allows it."""
        self._removals.start(self._retry_removal(groups, name))

    async def _retry_removal(self, groups: ControlGroups, name: str) -> None:
        while True:
            async with self._removing:  # one at a time: each may take milliseconds
                if await asyncio.to_thread(groups.remove, name):
                    return
            await asyncio.sleep(REMOVAL_RETRY_S)

    def _send_plan(self, clone: Clone, sandbox: MachineSandbox, new_template: bool) -> None:
        """Sends the plan by which a first process becomes a sandbox. Raises SandboxError."""
        has_groups = self._groups is not None
        request = plan_request(clone.number, sandbox.spec, clone.layers, has_groups, new_template, self.home)
        if not new_template:
            self._send(clone.server, request)
            return
        packed = pack_files(sandbox.spec.template)
        try:
            self._send(clone.server, request, packed)
        finally:
            os.close(packed)

    # Layers

    async def _save_layer(self, sandbox: MachineSandbox) -> tuple[str, ...]:
        """Saves the sandbox's changes as a layer; returns it and those below, each with one more use."""
        sandbox.spec.template.check_copyable()
        server = await self._ensure_started()
        clone = self._clones.get(sandbox.id)
        below = () if clone is None or self.has_whole_layers else clone.layers
        layer = self._new_layer()
        layers = (layer, *below)
        self._layer_uses.update(layers)
        try:
            async with sandbox.frozen() as channel:
                disk = await channel.borrow_disk(OPERATION_S)
                try:
                    await server.call({"op": "copy", "layer": layer}, disk)
                finally:
                    os.close(disk)
            if len(layers) <= MAX_LAYERS:
                return layers
            merged = self._new_layer()
            self._layer_uses[merged] += 1
            try:
                await server.call({"op": "merge", "layer": merged, "below": layers})
            except BaseException:
                self._release_layers([merged])
                raise
        except BaseException:
            self._release_layers(layers)
            raise
        self._release_layers(layers)
        return (merged,)

    def _new_layer(self) -> str:
        # Random, because it is visible inside, in the list of mounts.
        return secrets.token_hex(8)

    def _release_layers(self, layers: Sequence[str]) -> None:
        for layer in layers:
            self._layer_uses[layer] -= 1
            if self._layer_uses[layer] <= 0:
                del self._layer_uses[layer]
                self._delete_stored("layers", layer)

    def _delete_stored(self, kind: str, name: str) -> None:
        if self._server is not None:
            with contextlib.suppress(SandboxError):
                # A fork server that has ended stores nothing.
                self._send(self._server, {"op": "forget", "kind": kind, "name": name})

    async def _copy_part(self, operation: str, layer: str, file: Path, part: str) -> None:
        server = await self._ensure_started()
        flags = os.O_RDONLY if operation == "unpack" else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(file, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotError(
                f"a file of the snapshot cannot be opened: {error}", field="snapshot", received=str(file)
            ) from error
        try:
            await server.call({"op": operation, "layer": layer, "part": part}, descriptor)
        finally:
            os.close(descriptor)


class LocalBackend(ForkServerBackend):
    """Isolated sandboxes: user, mount, pid, network, IPC, UTS and cgroup namespaces, seccomp, rlimits."""

    name = "local"

    def __init__(self, state: Path | None = None, images: Path | None = None) -> None:
        super().__init__(state, images)
        self._spare_ids = find_host_ids().spare
        self.view: HostView | None = None
        """What its sandboxes see of the host besides programs; set before the first sandbox starts."""

    def doctor(self) -> list[str]:
        """Known obstacles of this machine, each with its fix; starts nothing."""
        return find_problems()

    def capabilities(self) -> Capabilities:
        ids = self._spare_ids
        # Without root's rights layers of images cannot be idmapped: all sandboxes with an image share a user.
        share = ids is None or (self._images is not None and bool(ids.programs))
        return dataclasses.replace(super().capabilities(), neighbours_share=share)

    def _arguments(self) -> Sequence[str]:
        images = "" if self._images is None else str(self._images.resolve() / "layers")
        view = "{}" if self.view is None else self.view.to_argument()
        # Files written to a directory of the host must belong to its owner: all sandboxes run as that user.
        spare = None if self.view is not None and self.view.in_place else self._spare_ids
        return ["namespaces", images, view, *([] if spare is None else spare.to_arguments())]

    def _interpreter(self) -> str:
        interpreter = os.path.realpath(sys.executable)
        return interpreter if os.access(interpreter, os.X_OK) else "/usr/bin/python3"

    def _open_groups(self) -> ControlGroups | None:
        return ControlGroups.open()
