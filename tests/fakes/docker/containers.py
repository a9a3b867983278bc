"""The containers of the fake engine: a directory, a process in a chamber, and whoever is attached."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import shutil
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from etude.sandbox.docker.frames import STDERR, STDOUT, pack_frame
from etude.sandbox.inside.processes import DescendantProcesses, descendants
from tests.fakes.docker.chamber import PATH, make_root
from tests.fakes.docker.images import FakeImage, chamber_command, copy_tree

State = Literal["created", "running", "paused", "exited"]
_CHUNK = 1 << 16


class Refusal(Exception):
    """The engine answers with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class FakeContainer:
    """One container, from its creation to its removal."""

    def __init__(
        self,
        name: str,
        image: FakeImage,
        config: dict[str, Any],
        directory: Path,
        forget: Callable[[FakeContainer], None],
    ) -> None:
        self.id = secrets.token_hex(32)
        self.name = name
        self.image = image
        self.config = config
        self.root = directory / self.id
        self.state: State = "created"
        self.exit_code = 0
        self.ended = asyncio.Event()
        self.removed = asyncio.Event()
        self._forget = forget
        self._started = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._attached: list[asyncio.StreamWriter] = []
        self._running: asyncio.Task[None] | None = None
        copy_tree(image.root, self.root)
        make_root(str(self.root))

    def environment(self) -> list[str]:
        """The image's variables and the container's own, later ones first to count."""
        rows = {row.partition("=")[0]: row for row in (self.image.config.get("Env") or ())}
        return list((rows | {row.partition("=")[0]: row for row in (self.config.get("Env") or ())}).values())

    async def start(self) -> None:
        """Runs the program. Raises Refusal."""
        if self.state == "paused":
            raise Refusal(409, "cannot start a paused container, try unpause instead")
        entry = self.config.get("Entrypoint") or self.image.config.get("Entrypoint") or []
        argv = [*entry, *(self.config.get("Cmd") or self.image.config.get("Cmd") or [])]
        environment = dict(row.split("=", 1) for row in self.environment())
        if not argv:
            raise Refusal(400, "no command specified")
        if not self._finds(argv[0], environment.get("PATH", PATH)):
            raise Refusal(
                400,
                "failed to create task for container: failed to create shim task: OCI runtime create failed: "
                f'runc create failed: unable to start container process: exec: "{argv[0]}": '
                "executable file not found in $PATH: unknown",
            )
        hostname = self.config.get("Hostname") or self.id[:12]
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            *chamber_command(self.root, hostname, argv),
            stdin=pipe if self.config.get("OpenStdin") else null,
            stdout=pipe,
            stderr=pipe,
            env=environment,
            start_new_session=True,
        )
        self.state = "running"
        self._started.set()
        self._running = asyncio.create_task(self._run(self._process))

    async def attach(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, with_input: bool
    ) -> None:
        """Serves one attached connection until the container ends or the client goes."""
        self._attached.append(writer)
        feeding = asyncio.create_task(self._feed(reader)) if with_input else None
        try:
            await self.ended.wait()
            with contextlib.suppress(OSError):
                await writer.drain()
        finally:
            self._attached.remove(writer)
            if feeding is not None:
                feeding.cancel()

    async def kill(self) -> None:
        """Ends it at once. Idempotent."""
        if self._process is None or self.state == "exited":
            return
        pids = self._pids()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none is to see another one's end
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        await self.ended.wait()

    def freeze(self, number: signal.Signals) -> None:
        """SIGSTOP: everything in it stands still; SIGCONT: goes on. Raises Refusal."""
        if self.state not in ("running", "paused"):
            raise Refusal(409, f"container {self.id} is not running")
        if (self.state == "paused") == (number == signal.SIGSTOP):
            what = "already paused" if self.state == "paused" else "not paused"
            raise Refusal(500, f"Container {self.id} is {what}")
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.state = "paused" if number == signal.SIGSTOP else "running"

    def unpack(self, path: str, archive: bytes) -> None:
        """Raises Refusal."""
        target = self.root / path.lstrip("/")
        if not target.is_dir():
            raise Refusal(404, f"Could not find the file {path} in container {self.name}")
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(target, numeric_owner=True, filter="tar")
        except tarfile.TarError as error:
            raise Refusal(400, f"unable to decode tar archive: {error}") from error

    def pack(self, path: str) -> bytes:
        """A file or directory as a tar archive. Raises Refusal."""
        source = self.root / path.strip("/")
        if not source.exists():
            raise Refusal(404, f"Could not find the file {path} in container {self.name}")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(source, arcname=source.name)
        return buffer.getvalue()

    def stat(self, path: str) -> dict[str, Any]:
        """What the engine says of a path beside its archive. Raises Refusal."""
        source = self.root / path.strip("/")
        if not source.exists():
            raise Refusal(404, f"Could not find the file {path} in container {self.name}")
        status = source.stat()
        kind = 0x80000000 if source.is_dir() else 0
        return {
            "name": source.name,
            "size": status.st_size,
            "mode": kind | (status.st_mode & 0o777),
            "mtime": "2026-01-01T00:00:00Z",
            "linkTarget": "",
        }

    def has_labels(self, wanted: list[str]) -> bool:
        """Whether it bears all of `key` or `key=value`."""
        labels = self.config.get("Labels") or {}
        pairs = {f"{key}={value}" for key, value in labels.items()}
        return all(label in pairs or label in labels for label in wanted)

    def summary(self) -> dict[str, Any]:
        """A row of `GET /containers/json`."""
        return {
            "Id": self.id,
            "Names": [f"/{self.name}"],
            "Image": self.config.get("Image"),
            "ImageID": self.image.id,
            "Command": " ".join(self.config.get("Cmd") or []),
            "Created": int(time.time()),
            "Labels": self.config.get("Labels") or {},
            "State": self.state,
            "Status": self.state,
            "Ports": [],
            "Mounts": [],
        }

    def describe(self) -> dict[str, Any]:
        """What `GET /containers/{id}/json` answers."""
        return {
            "Id": self.id,
            "Name": f"/{self.name}",
            "Image": self.image.id,
            "State": {
                "Status": self.state,
                "Running": self.state in ("running", "paused"),
                "Paused": self.state == "paused",
                "ExitCode": self.exit_code,
                "Pid": 0 if self._process is None else self._process.pid,
            },
            "Config": self.config | {"Env": self.environment()},
            "HostConfig": self.config.get("HostConfig") or {},
            "NetworkSettings": {"Networks": {}},
            "Mounts": [],
        }

    # Inner workings

    async def _run(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        await asyncio.gather(self._pump(process.stdout, STDOUT), self._pump(process.stderr, STDERR))
        code = await process.wait()
        self.exit_code = code if code >= 0 else 128 - code
        self.state = "exited"
        self.ended.set()
        if (self.config.get("HostConfig") or {}).get("AutoRemove"):
            self._forget(self)

    async def _pump(self, reader: asyncio.StreamReader, stream: int) -> None:
        while data := await reader.read(_CHUNK):
            for writer in list(self._attached):
                with contextlib.suppress(OSError):
                    writer.write(pack_frame(stream, data))
                    await writer.drain()

    async def _feed(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._started.wait()
                if self._process is not None and self._process.stdin is not None:
                    self._process.stdin.write(data)
                    await self._process.stdin.drain()
            if self.config.get("StdinOnce") and self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def _pids(self) -> list[int]:
        assert self._process is not None, "it was started"
        table = DescendantProcesses().table()
        return [self._process.pid, *descendants(table, [self._process.pid])]

    def _finds(self, program: str, path: str) -> bool:
        if "/" in program:
            return (self.root / program.lstrip("/")).exists() or Path(program).exists()
        return shutil.which(program, path=path) is not None
