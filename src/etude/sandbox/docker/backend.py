"""Sandboxes in containers: everything through the engine's socket, nothing shared with the host.

The program inside is the container's first process and talks over its attached standard streams. It is
root with six capabilities; commands run as a user of their own without any. What a snapshot holds is an
image that the engine commits: files alone. An engine that dies takes its sandboxes with it (`lost`); an
owner that dies closes their standard input, upon which they end and the engine removes them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.durable import whole_file
from etude.kit.leftovers import is_owner_alive, owner_tag
from etude.sandbox.channel import READY, Channel
from etude.sandbox.docker.api import Engine, EngineError
from etude.sandbox.docker.container import HOST_LABEL, OWNER_LABEL, Setup, container_config, upload
from etude.sandbox.docker.frames import Demultiplexer
from etude.sandbox.docker.line import Line
from etude.sandbox.errors import SnapshotError, TemplateError
from etude.sandbox.installing import install_template
from etude.sandbox.machine import MachineSandbox, Spec, greeting
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.snapshots import Snapshot, SnapshotDraft
from etude.sandbox.template import Image
from etude.sandbox.types import Capabilities, SnapshotInfo, SnapshotKind

START_S = 60.0
INSTALL_S = 60.0
REPOSITORY = "etude-snapshot"
_EXPORT = ("snapshot.tar", "image.tar")
_PING_S = 30.0
_CONFLICT = 409


@dataclass
class _Container:
    """What belongs to one running sandbox."""

    name: str
    line: Line
    output: Demultiplexer = field(default_factory=Demultiplexer)


class DockerBackend(MachineBackend):
    """Sandboxes in containers of a Docker engine. See `Setup` for what can be chosen."""

    name = "docker"
    sockets = ("/var/run/docker.sock", "{runtime}/docker.sock")
    """Where the engine's socket may lie; the first that exists is used."""

    def __init__(
        self, socket: Path | None = None, setup: Setup | None = None, state: Path | None = None
    ) -> None:
        """`socket`: the engine's; None: where engines usually put it. Nothing is opened yet."""
        super().__init__(state)
        self.setup = setup or Setup()
        self.socket = socket or self._usual_socket()
        self.engine = Engine(self.socket)
        self._containers: dict[str, _Container] = {}
        self._committed: dict[str, str] = {}
        self._doomed: set[str] = set()
        self._sweeping: asyncio.Task[None] | None = None

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities. Images: those of the engine (see `image`)."""
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
        """An image of the engine, for use in a template. Raises TemplateError if the engine has none."""
        config = (await self.engine.inspect_image(reference)).get("Config") or {}
        workdir = config.get("WorkingDir") or ""
        env = _variables(config.get("Env"))
        workspace = workdir if workdir.strip("/") else Image("", ()).workdir
        return Image(reference, (), env, workspace, config.get("User") or "root")

    async def build_image(
        self, context: Path, tag: str, dockerfile: str = "Dockerfile", network: bool = False
    ) -> Image:
        """Builds a Dockerfile with the engine's builder (see Engine.build), for use in a template."""
        await self.engine.build(context, tag, dockerfile, network)
        return await self.image(tag)

    def doctor(self) -> list[str]:
        """See SandboxBackend.doctor. Asks the engine for a sign of life."""
        if not self.socket.is_socket():
            return [f"no engine at {self.socket}: install and start {self.name}, or name its socket"]
        if not os.access(self.socket, os.R_OK | os.W_OK):
            return [f"{self.socket} may not be opened by this user: add it to the socket's group"]
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(_PING_S)
                line.connect(str(self.socket))
                line.sendall(b"GET /_ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answered = line.recv(64).startswith(b"HTTP/1.1 200")
        except OSError as error:
            return [f"the engine at {self.socket} does not answer ({error}): restart {self.name}"]
        return [] if answered else [f"what answers at {self.socket} is no engine: name another socket"]

    # The life of a machine

    async def boot(self, sandbox: MachineSandbox) -> Channel:
        """See MachineBackend.boot."""
        channel = await self._run(sandbox, await self._image_for(sandbox.spec))
        await install_template(channel, sandbox.spec.template, INSTALL_S)
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
                fix="import the snapshot again, or make it anew",
            ) from error

    async def save(self, sandbox: MachineSandbox, kind: SnapshotKind, draft: SnapshotDraft) -> None:
        """See MachineBackend.save: commits the container's files."""
        container = self._containers[sandbox.id]
        self._committed[sandbox.id] = f"{REPOSITORY}:{draft.id}"
        async with sandbox.standing_still():
            image = await self.engine.commit(container.name, REPOSITORY, draft.id)
        draft.extra |= {"image": f"{REPOSITORY}:{draft.id}", "image_id": image}

    async def stop(self, sandbox: MachineSandbox) -> None:
        """See MachineBackend.stop."""
        container = self._containers.pop(sandbox.id, None)
        if container is None:
            return
        await container.line.close()
        await self.engine.remove(container.name)
        for image in list(self._doomed):
            await self._drop_image(image)

    async def delete_snapshot(self, snapshot: str) -> None:
        """See SandboxBackend.delete_snapshot. An image that is in use goes once its last user has."""
        await super().delete_snapshot(snapshot)
        await self._drop_image(f"{REPOSITORY}:{snapshot}")

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        """See SandboxBackend.export_snapshot: with the image and all of its layers."""
        with tempfile.TemporaryDirectory(prefix="etude-export-", dir=target.parent) as directory:
            parts = [Path(directory, name) for name in _EXPORT]
            await super().export_snapshot(snapshot, parts[0])
            await self.engine.save_image(f"{REPOSITORY}:{snapshot}", parts[1])
            await asyncio.to_thread(_join, parts, target)

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        """See SandboxBackend.import_snapshot."""
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

    async def _save(self, sandbox: MachineSandbox, kind: SnapshotKind, name: str | None) -> SnapshotInfo:
        try:
            info = await super()._save(sandbox, kind, name)
        except BaseException:
            image = self._committed.pop(sandbox.id, None)
            if image is not None:
                await asyncio.shield(self._drop_image(image))
            raise
        self._committed.pop(sandbox.id, None)
        return info

    async def _run(self, sandbox: MachineSandbox, image: str) -> Channel:
        """A container of an image with the program inside; its line answers."""
        await self._sweep()
        spec = sandbox.spec
        line = Line(lambda reason: self.lost(sandbox))
        container = _Container(f"etude-{sandbox.id}", line)
        self._containers[sandbox.id] = container
        channel = Channel(line.socket, sandbox.id)
        labels = {OWNER_LABEL: owner_tag(), HOST_LABEL: _host()}
        config = container_config(self.setup, image, spec.template.workspace, spec.resources, labels)
        config["Hostname"] = sandbox.id
        try:
            sandbox.environment |= await self._environment(image)
            await self.engine.create_container(container.name, config)
            archive = upload(spec.template.workspace, self.setup.command_uid)
            await self.engine.put_archive(container.name, archive)
            reader, writer = await self.engine.attach(container.name)
            await line.connect(reader, writer, container.output.feed)
            await self.engine.start(container.name)
            await channel.answer(READY, START_S)
            await channel.request(greeting(sandbox.id), b"", START_S)
        except SandboxError as error:
            channel.close("the sandbox never ran")
            said = container.output.errors.decode(errors="replace").strip()
            if said:
                error.args = (f"{error.message}; the container said: {said}", *error.args[1:])
                error.message = error.args[0]
            raise
        except BaseException:
            channel.close("the sandbox never ran")
            raise
        return channel

    async def _image_for(self, spec: Spec) -> str:
        """The image that a spec asks for; it is there. Raises TemplateError."""
        wanted = spec.template.image
        if wanted is not None and wanted.layers:
            raise TemplateError(
                "an engine runs its own images, not layers of ours",
                field="template.image",
                received=wanted.name,
                fix="build it with DockerBackend.build_image, or use the local backend",
            )
        reference = self.setup.image if wanted is None else wanted.name
        try:
            await self.engine.inspect_image(reference)
        except TemplateError:
            if not self.setup.pull:
                raise
            await self.engine.pull(reference)
        return reference

    async def _environment(self, image: str) -> dict[str, str]:
        """What an image sets for its programs: the server does not hand its own environment on."""
        config = (await self.engine.inspect_image(image)).get("Config") or {}
        return _variables(config.get("Env"))

    async def _drop_image(self, image: str) -> None:
        """Removes an image now, or, while containers of it run, once they have stopped."""
        try:
            await self.engine.remove_image(image)
        except EngineError as error:
            if error.status != _CONFLICT:
                raise
            self._doomed.add(image)
        else:
            self._doomed.discard(image)

    async def _sweep(self) -> None:
        """Once: removes containers whose owner on this host is dead (one that never came to attach)."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._remove_orphans())
        try:
            await asyncio.shield(self._sweeping)
        except SandboxError:
            self._sweeping = None
            raise

    async def _remove_orphans(self) -> None:
        for row in await self.engine.list_containers(f"{HOST_LABEL}={_host()}"):
            owner = (row.get("Labels") or {}).get(OWNER_LABEL, "")
            if not is_owner_alive(owner):
                await self.engine.remove(row["Id"])

    def _usual_socket(self) -> Path:
        runtime = f"/run/user/{os.getuid()}"
        places = [Path(place.format(runtime=runtime)) for place in self.sockets]
        return next((place for place in places if place.exists()), places[0])


class PodmanBackend(DockerBackend):
    """The same over podman's Docker-compatible service (`podman system service`)."""

    name = "podman"
    sockets = ("{runtime}/podman/podman.sock", "/run/podman/podman.sock")


def _variables(rows: list[str] | None) -> dict[str, str]:
    return {name: value for name, _, value in (row.partition("=") for row in rows or ())}


def _host() -> str:
    """This boot of this host: process ids mean nothing elsewhere."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _join(parts: list[Path], target: Path) -> None:
    with whole_file(target, sync=False) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for part in parts:
            archive.add(part, arcname=part.name, recursive=False)


def _part(source: Path, directory: Path) -> None:
    """Unpacks exactly the two parts of an export. Raises SnapshotError."""
    try:
        with tarfile.open(source, "r:") as archive:
            members = archive.getmembers()
            if [member.name for member in members] != list(_EXPORT) or not all(m.isreg() for m in members):
                raise tarfile.TarError("it holds something else")
            for member in members:
                archive.extract(member, directory, set_attrs=False, filter="data")
    except (OSError, tarfile.TarError, EOFError) as error:
        raise SnapshotError(
            f"this is no exported snapshot of containers: {error}",
            field="snapshot",
            received=source.name,
            fix="export it again",
        ) from error
