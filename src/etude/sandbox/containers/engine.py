"""The command line of docker or podman: the words that sandboxes need, with deadlines and typed errors; how a
sandbox's container is made, and what is copied into it before it starts."""

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
"""Of sandboxes whose template names none. An image must hold Python 3.9 or newer, and a shell."""
COMMAND_UID = 1000
OWNER_LABEL = "etude.owner"
HOST_LABEL = "etude.host"
SERVER_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What the server needs to run commands as another user and to look after that user's files and processes.
Commands themselves have none, and get none back: no-new-privileges."""
_SERVER_PROCESSES, _SERVER_FILES = 8, 256
_SHARED_MEMORY_BYTES = 64 << 20
_PROCESSES_OF_A_USER = 4096
"""The kernel counts them over all containers, so that `num_processes` is kept by the pids limit. An engine
that may not raise its own limit fails on the one that it would set by itself."""


def create_arguments(
    hostname: str,
    image: str,
    command_uid: int | None,
    workspace: str,
    resources: Resources,
    labels: Mapping[str, str],
) -> list[str]:
    """The words of `create`: a container without network or mounts, with limits, that is removed when it
    ends. `command_uid`: user id that commands run as; None: root's, with the server's capabilities."""
    limits = {"nofile": resources.open_files + _SERVER_FILES, "fsize": max(resources.file_bytes, 1 << 20)}
    limits |= {"core": 0, "nproc": _PROCESSES_OF_A_USER}
    pids = resources.num_processes + _SERVER_PROCESSES
    words = ["--hostname", hostname, "--interactive", "--rm", "--pull=never", "--network=none"]
    words += ["--workdir=/", "--no-healthcheck", "--ipc=private", "--cgroupns=private"]
    words += ["--log-driver=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    words += [f"--cap-add={one}" for one in SERVER_CAPABILITIES]
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
    """The tar archive that is unpacked at `/` before the start: the program, and its directories."""
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
"""For commands that only change what the engine keeps about a container."""
TRANSFER_S = 900.0
"""For commands that move whole images."""
_SAID_CHARS = 2000
_MISSING = re.compile(r"no such (image|object)|image not known", re.IGNORECASE)
_GONE = re.compile(r"no such container|no container with|already in progress", re.IGNORECASE)
_IN_USE = re.compile(r"in use|being used|has dependent|must be forced", re.IGNORECASE)


class EngineError(SandboxError):
    """The engine refused a command, or did not end it in time."""

    def says(self, pattern: re.Pattern[str]) -> bool:
        """Whether the engine's own words match."""
        return pattern.search(self.message) is not None


class Engine:
    """One container engine behind its command line. Every command has a deadline."""

    def __init__(self, program: str) -> None:
        """`program`: `docker` or `podman`, or a path of one."""
        self.program = program

    async def run(
        self, *words: str, given: bytes = b"", deadline_s: float = CALL_S, scratch: str | None = None
    ) -> str:
        """Runs `program words...` with `given` as its input: what it wrote. `scratch`: for its temporary
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
                output, said = await process.communicate(given)
        except TimeoutError:
            raise self._error(words[0], f"no answer within {deadline_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise self._error(words[0], said.decode(errors="replace").strip()[-_SAID_CHARS:])
        return output.decode(errors="replace").strip()

    async def create(self, container: str, arguments: Sequence[str], archive: bytes) -> None:
        """Makes a container, which does not run yet, and unpacks a tar archive at its root."""
        await self.run("create", "--name", container, *arguments)
        # Podman leaves what it read behind, in a file of its own.
        with tempfile.TemporaryDirectory(prefix="etude-copy-") as scratch:
            await self.run("cp", "-", f"{container}:/", given=archive, scratch=scratch)

    async def attach(
        self, container: str, line: socket.socket, said: IO[bytes]
    ) -> asyncio.subprocess.Process:
        """Starts a container with `line` as its standard input and output, and `said` for standard error.

        The process that carries them lives as long as the container does.
        """
        words = ("start", "--attach", "--interactive", container)
        return await asyncio.create_subprocess_exec(
            self.program, *words, stdin=line.fileno(), stdout=line.fileno(), stderr=said
        )

    async def remove(self, container: str) -> None:
        """Kills and removes a container with its volumes; one that is gone is fine."""
        try:
            await self.run("rm", "--force", "--volumes", container)
        except EngineError as error:
            if not error.says(_GONE):
                raise

    async def load_image(self, source: Path) -> None:
        """Takes an image from an archive, under the name that it has there."""
        await self.run("load", "--input", str(source), deadline_s=TRANSFER_S)

    async def labels(self, label: str, wanted: str) -> dict[str, str]:
        """Of all containers that bear `label` (`key=value`): id -> value of the label `wanted`.

        One that ends meanwhile is left out.
        """
        found = (await self.run("ps", "--all", "--quiet", "--filter", f"label={label}")).split()
        shown = "{{index .Config.Labels " + json.dumps(wanted) + "}}"
        values: dict[str, str] = {}
        for one in found:
            try:
                values[one] = await self.run("inspect", "--format", shown, one)
            except EngineError as error:
                if not error.says(_GONE) and not error.says(_MISSING):
                    raise
        return values

    async def image(self, reference: str) -> dict[str, Any]:
        """What the engine says of an image: its `Id`, and `Config` with `Env`, `WorkingDir`, `User`.

        Raises TemplateError if it has none of that name.
        """
        try:
            shown = await self.run("image", "inspect", reference)
        except EngineError as error:
            if not error.says(_MISSING):
                raise
            raise TemplateError(
                f"{self.program} has no such image",
                field="sandbox.image",
                received=reference,
                fix=f"make it there: `{self.program} pull`, `{self.program} load` or `{self.program} build`",
            ) from error
        return json.loads(shown)[0]

    async def remove_image(self, image: str) -> bool:
        """Removes an image; one that is gone is fine. False: a container uses it still."""
        try:
            await self.run("rmi", image)
        except EngineError as error:
            if error.says(_IN_USE):
                return False
            if not error.says(_MISSING):
                raise
        return True

    def _error(self, word: str, reason: str) -> EngineError:
        return EngineError(
            f"{self.program} {word}: {reason}",
            field="sandbox.backend",
            received=self.program,
            fix=f"see whether `{self.program} {word}` works in a shell",
        )
