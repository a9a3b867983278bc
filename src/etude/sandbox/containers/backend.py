"""Sandboxes in containers of docker or podman, run by their command line; nothing is shared with the host.

The program inside is the container's first process and communicates by its attached standard streams. It is
root with six capabilities; commands run as another user without any, or, in a template's own image, as root
with the same six. A snapshot is an image that the engine commits, with files only. If the engine dies, its
sandboxes are `lost`; if their owner dies, their standard input is closed, whereupon they end and the engine
removes them.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from etude.errors import SandboxError
from etude.kit.leftovers import boot_id, is_owner_alive, owner_tag
from etude.sandbox.channel import READY, Channel
from etude.sandbox.containers.engine import (
    COMMAND_UID,
    HOST_LABEL,
    IMAGE,
    OWNER_LABEL,
    TRANSFER_S,
    Engine,
    create_arguments,
    pack_upload,
)
from etude.sandbox.errors import SnapshotError, TemplateError
from etude.sandbox.guest_program import install_template
from etude.sandbox.machine import MachineSandbox, greeting
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.snapshots import Snapshot, SnapshotDraft, Spec, pack_files, unpack_files
from etude.sandbox.template import Image
from etude.sandbox.types import Capabilities, SnapshotInfo, SnapshotKind

START_S = 60.0
INSTALL_S = 60.0
REPOSITORY = "etude-snapshot"
_EXPORT = ("snapshot.tar", "image.tar")
_STARTS_AT_ONCE = 4
"""Engines serialise starts by locks: with many at once each takes as long as all together."""
_DOCTOR_S = 30.0
_STDERR_BYTES = 4000


@dataclass
class _Container:
    """The container of one running sandbox."""

    name: str
    stderr: IO[bytes]
    """File with the error output of the container and the engine."""
    client: asyncio.subprocess.Process | None = None
    """The engine's client process, attached to the container's standard streams."""

    def stderr_tail(self) -> str:
        size = self.stderr.seek(0, 2)
        self.stderr.seek(max(0, size - _STDERR_BYTES))
        return self.stderr.read().decode(errors="replace").strip()


class ContainerBackend(MachineBackend):
    """Sandboxes in containers of one engine."""

    def __init__(self, program: str, image: str = IMAGE, state: Path | None = None) -> None:
        """`program`: `docker` or `podman`. `image`: default for templates without one. Starts nothing yet."""
        super().__init__(state)
        self.name = program
        self._default_image = image
        self.engine = Engine(program)
        self._containers: dict[str, _Container] = {}
        self._unremoved_images: set[str] = set()
        """Images of deleted snapshots that containers still used."""
        self._sweeping: asyncio.Task[None] | None = None
        self._starting = asyncio.Semaphore(_STARTS_AT_ONCE)

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities. Supports the engine's images (see `image`)."""
        return Capabilities(
            backend=self.name,
            isolation="container",
            commands=True,
            network=True,
            images=True,
            snapshots=frozenset({"filesystem"}),
            pause=frozenset({"filesystem"}),
            fork="filesystem",
            migrate="filesystem",
        )

    async def image(self, reference: str) -> Image:
        """The engine's image that `reference` names now, by its id, for use in a template.

        Raises TemplateError if the engine does not have it.
        """
        shown = await self.engine.image(reference)
        config = shown.get("Config") or {}
        workdir = config.get("WorkingDir") or ""
        workspace = workdir if workdir.strip("/") else Image("", ()).workdir
        return Image(shown["Id"], (), _variables(config.get("Env")), workspace, config.get("User") or "root")

    def doctor(self) -> list[str]:
        """See SandboxBackend.doctor. Checks that the engine answers."""
        program = self.engine.program
        if shutil.which(program) is None:
            return [f"{program} is not installed: install it, or use another backend"]
        try:
            asked = subprocess.run(
                [program, "ps", "--quiet", "--last=1"], capture_output=True, text=True, timeout=_DOCTOR_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"{program} does not answer ({error}): restart it"]
        if asked.returncode:
            return [f"{program} does not work: {asked.stderr.strip()[-500:]}"]
        return []

    # MachineBackend

    async def boot(self, sandbox: MachineSandbox) -> Channel:
        channel = await self._run(sandbox, self._image_for(sandbox.spec))
        template = sandbox.spec.template
        await install_template(channel, template, INSTALL_S, keep=template.image is not None)
        return channel

    async def restore(self, sandbox: MachineSandbox, snapshot: Snapshot) -> Channel:
        """See MachineBackend.restore: a new container of the committed image."""
        image = str(snapshot.extra["image"])
        try:
            return await self._run(sandbox, image)
        except TemplateError as error:
            raise SnapshotError(
                f"the engine no longer has its image: {error.message}",
                field="snapshot",
                received=snapshot.info.id,
                fix="import the snapshot again, or create a new one",
            ) from error

    async def save(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        """See MachineBackend.save: commits the container's files."""
        draft.extra["image"] = image = f"{REPOSITORY}:{draft.id}"
        async with sandbox.frozen():
            container = self._containers[sandbox.id].name
            await self.engine.run("commit", "--pause=true", container, image, deadline_s=TRANSFER_S)

    async def stop(self, sandbox: MachineSandbox) -> None:
        container = self._containers.pop(sandbox.id, None)
        if container is None:
            return
        await self.engine.remove(container.name)
        if container.client is not None:
            await container.client.wait()
        container.stderr.close()
        for image in list(self._unremoved_images):
            await self._drop_image(image)

    async def delete_snapshot(self, snapshot: str) -> None:
        """See SandboxBackend.delete_snapshot. An image in use is removed when its last container stops."""
        await super().delete_snapshot(snapshot)
        await self._drop_image(f"{REPOSITORY}:{snapshot}")

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        """See SandboxBackend.export_snapshot: includes the image with all its layers."""
        with tempfile.TemporaryDirectory(prefix="etude-export-", dir=target.parent) as directory:
            parts = [Path(directory, name) for name in _EXPORT]
            await super().export_snapshot(snapshot, parts[0])
            image = f"{REPOSITORY}:{snapshot}"
            await self.engine.run("save", "--output", str(parts[1]), image, deadline_s=TRANSFER_S)
            await asyncio.to_thread(pack_files, parts, target)

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        with tempfile.TemporaryDirectory(prefix="etude-import-", dir=source.parent) as directory:
            await asyncio.to_thread(_part, source, Path(directory))
            info = await super().import_snapshot(Path(directory, _EXPORT[0]))
            try:
                await self.engine.load_image(Path(directory, _EXPORT[1]))
            except BaseException:
                await asyncio.to_thread(self.snapshots.delete, info.id)
                raise
            return info

    # Inner workings

    async def discard(self, draft: SnapshotDraft) -> None:
        await super().discard(draft)
        if "image" in draft.extra:
            await asyncio.shield(self._drop_image(draft.extra["image"]))

    async def _run(self, sandbox: MachineSandbox, image: str) -> Channel:
        await self._sweep()
        async with self._starting:
            return await self._run_now(sandbox, image)

    async def _run_now(self, sandbox: MachineSandbox, image: str) -> Channel:
        """Starts a container of an image with the program inside; its ready channel."""
        spec, name = sandbox.spec, f"etude-{sandbox.id}"
        container = self._containers[sandbox.id] = _Container(name, tempfile.TemporaryFile())  # noqa: SIM115  # stop() closes it
        ours, theirs = socket.socketpair()
        channel = Channel(ours, sandbox.id)
        labels = {OWNER_LABEL: owner_tag(), HOST_LABEL: boot_id()}
        try:
            with theirs:
                # The server does not pass its own environment to commands.
                config = (await self.engine.image(image)).get("Config") or {}
                sandbox.environment |= _variables(config.get("Env"))
                if spec.template.image is not None:
                    sandbox.environment |= spec.template.image.env
                workspace = spec.template.workspace
                # Commands run as root in a template's own image, whose files belong to root.
                uid = COMMAND_UID if spec.template.image is None else None
                words = create_arguments(sandbox.id, image, uid, workspace, spec.resources, labels)
                await self.engine.create(name, words, pack_upload(workspace, uid))
                container.client = await self.engine.attach(name, theirs, container.stderr)
            await channel.answer(READY, START_S)
            await channel.request(greeting(sandbox.id), b"", START_S)
        except SandboxError as error:
            channel.close("the sandbox never ran")
            raise _explained(error, container, image) from error
        except BaseException:
            channel.close("the sandbox never ran")
            raise
        return channel

    def _image_for(self, spec: Spec) -> str:
        """The name of the engine's image for a spec. Raises TemplateError for one of our layered images."""
        wanted = spec.template.image
        if wanted is not None and wanted.layers:
            raise TemplateError(
                "container engines cannot run images of the layer store",
                field="template.image",
                received=wanted.name,
                fix=f"build it with `{self.name} build`, or use the local backend",
            )
        return self._default_image if wanted is None else wanted.name

    async def _drop_image(self, image: str) -> None:
        """Removes an image now, or after its running containers have stopped."""
        if await self.engine.remove_image(image):
            self._unremoved_images.discard(image)
        else:
            self._unremoved_images.add(image)

    async def _sweep(self) -> None:
        """Once per process, removes containers whose owner on this host died before it attached."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._remove_orphans())
        try:
            await asyncio.shield(self._sweeping)
        except SandboxError:
            self._sweeping = None
            raise

    async def _remove_orphans(self) -> None:
        owners = await self.engine.labels(f"{HOST_LABEL}={boot_id()}", OWNER_LABEL)
        for container, owner in owners.items():
            if not is_owner_alive(owner):
                await self.engine.remove(container)


def _explained(error: SandboxError, container: _Container, image: str) -> SandboxError | TemplateError:
    """Adds the container's error output to an error; a TemplateError if the image has no Python."""
    stderr = container.stderr_tail()
    if "executable file" in stderr:
        return TemplateError(
            stderr,
            field="sandbox.image",
            received=image,
            fix="use an image with python3 on its path",
        )
    if "cgroups in hybrid mode" in stderr:
        error.fix = (
            'install runc, and write runtime = "runc" below [engine] in /etc/containers/containers.conf'
        )
    if stderr:
        error.args = (f"{error.message}; the container said: {stderr}", *error.args[1:])
        error.message = error.args[0]
    return error


def _variables(rows: list[str] | None) -> dict[str, str]:
    return {name: value for name, _, value in (row.partition("=") for row in rows or ())}


def _part(source: Path, directory: Path) -> None:
    """Unpacks an export into its two parts. Raises SnapshotError."""
    unpack_files(source, directory)
    if {path.name for path in directory.iterdir()} != set(_EXPORT):
        raise SnapshotError(
            "this is not an exported container snapshot",
            field="snapshot",
            received=source.name,
            fix="export it again",
        )
