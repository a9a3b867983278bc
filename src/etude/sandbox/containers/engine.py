"""The command line of docker or podman: the words that sandboxes need, with deadlines and typed errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from etude.errors import SandboxError
from etude.sandbox.errors import TemplateError

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
