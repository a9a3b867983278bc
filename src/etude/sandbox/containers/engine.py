"""Runs the command line of docker or podman with deadlines and typed errors; builds the arguments for a
sandbox's container, and the archive that is copied into it before it starts."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from etude.errors import SandboxError
from etude.sandbox.errors import TemplateError
from etude.sandbox.guest_program import guest_arguments, guest_program
from etude.sandbox.types import Resources

PROGRAM = "/var/lib/etude/guest.pyz"
BASE = "/var/lib/etude/base"
IMAGE = "python:3.11-slim"
"""Default for templates without an image. An image must contain Python 3.9 or newer, and a shell."""
COMMAND_UID = 1000
OWNER_LABEL = "etude.owner"
HOST_LABEL = "etude.host"
SERVER_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Needed by the server to run commands as another user and to manage that user's files and processes.
Commands have none of them, and cannot regain any: no-new-privileges."""
_SERVER_PROCESSES, _SERVER_FILES = 8, 256
_SHARED_MEMORY_BYTES = 64 << 20
_PROCESSES_OF_A_USER = 4096
"""The kernel counts these over all containers, so `num_processes` is enforced by the pids limit. Set because
an engine that may not raise its own limit fails on its default."""


def create_arguments(
    hostname: str,
    image: str,
    command_uid: int | None,
    workspace: str,
    resources: Resources,
    labels: Mapping[str, str],
) -> list[str]:
    """The arguments of `create`: a container without network or mounts, with limits, that is removed when it
    ends. `command_uid`: user id of commands; None: root, with the server's capabilities."""
    limits = {"nofile": resources.open_files + _SERVER_FILES, "fsize": max(resources.file_bytes, 1 << 20)}
    limits |= {"core": 0, "nproc": _PROCESSES_OF_A_USER}
    pids = resources.num_processes + _SERVER_PROCESSES
    words = ["--hostname", hostname, "--interactive", "--rm", "--pull=never", "--network=none"]
    words += ["--workdir=/", "--no-healthcheck", "--ipc=private", "--cgroupns=private"]
    words += ["--log-driver=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    words += [f"--cap-add={capability}" for capability in SERVER_CAPABILITIES]
    words += [f"--memory={resources.memory_bytes}", f"--memory-swap={resources.memory_bytes}"]
    words += [f"--cpus={resources.cpus:g}", f"--pids-limit={pids}"]
    words += [f"--shm-size={min(resources.disk_bytes, _SHARED_MEMORY_BYTES)}"]
    words += [f"--ulimit={limit}={value}:{value}" for limit, value in limits.items()]
    words += [f"--label={key}={value}" for key, value in labels.items()]
    words += ["--env=PYTHONHASHSEED=0", "--env=LANG=C.UTF-8", "--user=0:0"]
    words += ["--entrypoint=python3", image, "-I", "-S", "-B", PROGRAM]
    user = {} if command_uid is None else {"uid": command_uid}
    return words + guest_arguments(resources, line="stdio", workspace=workspace, base=BASE, **user)


def pack_upload(workspace: str, command_uid: int | None) -> bytes:
    """The tar archive that is unpacked at `/` before the start: the program inside, and its directories."""
    owner, buffer = command_uid or 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, mode, user, content in (
            ("var/lib/etude", 0o755, 0, None),
            (PROGRAM, 0o444, 0, guest_program()),
            (BASE, 0o755, 0, None),
            (workspace, 0o755, owner, None),
        ):
            row = tarfile.TarInfo(name.strip("/"))
            row.mode, row.uid, row.gid = mode, user, user
            row.type, row.size = (tarfile.DIRTYPE, 0) if content is None else (tarfile.REGTYPE, len(content))
            archive.addfile(row, None if content is None else io.BytesIO(content))
        size = archive.offset
    # Without the padding: podman stops reading at the end mark, and then fails to write what follows it.
    return buffer.getvalue()[:size] + bytes(2 * tarfile.BLOCKSIZE)


CALL_S = 60.0
"""Deadline of commands that do not transfer images."""
TRANSFER_S = 900.0
"""Deadline of commands that transfer whole images."""
_STDERR_CHARS = 2000
_MISSING = re.compile(r"no such (image|object)|image not known", re.IGNORECASE)
_GONE = re.compile(r"no such container|no container with|already in progress", re.IGNORECASE)
_IN_USE = re.compile(r"in use|being used|has dependent|must be forced", re.IGNORECASE)


class EngineError(SandboxError):
    """A command of the engine failed, or did not end in time."""

    def matches(self, pattern: re.Pattern[str]) -> bool:
        """Whether the engine's message matches."""
        return pattern.search(self.message) is not None


class Engine:
    """A container engine, used by its command line. Every command has a deadline."""

    def __init__(self, program: str) -> None:
        """`program`: `docker` or `podman`, or the path of one."""
        self.program = program

    async def run(
        self, *words: str, given: bytes = b"", deadline_s: float = CALL_S, scratch: str | None = None
    ) -> str:
        """Runs `program words...` with the input `given`; its output. `scratch`: directory of its temporary
        files. Raises EngineError."""
        pipe, env = asyncio.subprocess.PIPE, None if scratch is None else {**os.environ, "TMPDIR": scratch}
        try:
            process = await asyncio.create_subprocess_exec(
                self.program, *words, stdin=pipe, stdout=pipe, stderr=pipe, env=env
            )
        except OSError as error:
            raise self._error(words[0], f"it cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(deadline_s):
                output, stderr = await process.communicate(given)
        except TimeoutError:
            raise self._error(words[0], f"no answer within {deadline_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise self._error(words[0], stderr.decode(errors="replace").strip()[-_STDERR_CHARS:])
        return output.decode(errors="replace").strip()

    async def create(self, container: str, arguments: Sequence[str], archive: bytes) -> None:
        """Creates a container, which does not run yet, and unpacks a tar archive at its root."""
        await self.run("create", "--name", container, *arguments)
        # Podman leaves a temporary file with its input behind.
        with tempfile.TemporaryDirectory(prefix="etude-copy-") as scratch:
            await self.run("cp", "-", f"{container}:/", given=archive, scratch=scratch)

    async def attach(
        self, container: str, line: socket.socket, stderr: IO[bytes]
    ) -> asyncio.subprocess.Process:
        """Starts a container with `line` as its standard input and output, and `stderr` as standard error.

        The returned client process runs as long as the container.
        """
        words = ("start", "--attach", "--interactive", container)
        return await asyncio.create_subprocess_exec(
            self.program, *words, stdin=line.fileno(), stdout=line.fileno(), stderr=stderr
        )

    async def remove(self, container: str) -> None:
        """Kills and removes a container with its volumes, if it exists."""
        try:
            await self.run("rm", "--force", "--volumes", container)
        except EngineError as error:
            if not error.matches(_GONE):
                raise

    async def load_image(self, source: Path) -> None:
        """Loads an image from an archive, under the name that it has there."""
        await self.run("load", "--input", str(source), deadline_s=TRANSFER_S)

    async def labels(self, label: str, wanted: str) -> dict[str, str]:
        """Containers with `label` (`key=value`): id -> value of their label `wanted`.

        Skips containers that end meanwhile.
        """
        found = (await self.run("ps", "--all", "--quiet", "--filter", f"label={label}")).split()
        shown = "{{index .Config.Labels " + json.dumps(wanted) + "}}"
        values: dict[str, str] = {}
        for container in found:
            try:
                values[container] = await self.run("inspect", "--format", shown, container)
            except EngineError as error:
                if not error.matches(_GONE) and not error.matches(_MISSING):
                    raise
        return values

    async def image(self, reference: str) -> dict[str, Any]:
        """The engine's description of an image: its `Id`, and `Config` with `Env`, `WorkingDir`, `User`.

        Raises TemplateError if there is no image of that name.
        """
        try:
            shown = await self.run("image", "inspect", reference)
        except EngineError as error:
            if not error.matches(_MISSING):
                raise
            raise TemplateError(
                f"{self.program} has no such image",
                field="sandbox.image",
                received=reference,
                fix=f"make it there: `{self.program} pull`, `{self.program} load` or `{self.program} build`",
            ) from error
        return json.loads(shown)[0]

    async def remove_image(self, image: str) -> bool:
        """Removes an image, if it exists. False: a container still uses it."""
        try:
            await self.run("rmi", image)
        except EngineError as error:
            if error.matches(_IN_USE):
                return False
            if not error.matches(_MISSING):
                raise
        return True

    def _error(self, word: str, reason: str) -> EngineError:
        return EngineError(
            f"{self.program} {word}: {reason}",
            field="sandbox.backend",
            received=self.program,
            fix=f"check whether `{self.program} {word}` works in a shell",
        )
