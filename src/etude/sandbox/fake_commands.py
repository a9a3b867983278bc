"""What a sandbox in memory does not have, and how it says so."""

from __future__ import annotations

from collections.abc import Mapping

from etude.sandbox.arguments import check_timeout
from etude.sandbox.errors import Unsupported
from etude.sandbox.interface import Command, OnOutput
from etude.sandbox.types import CommandResult, ProcessInfo


class MemoryCommands:
    """`Commands` that refuses: there is no process to run them in."""

    async def run(
        self,
        cmd: str,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        stdin: str | bytes | None = None,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        """Raises Unsupported; ConfigError for a timeout that is no time."""
        check_timeout(timeout_s)
        raise unsupported_here("commands")

    async def start(
        self,
        cmd: str,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        on_output: OnOutput | None = None,
    ) -> Command:
        """Raises Unsupported; ConfigError as `run`."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        raise unsupported_here("commands")

    async def list(self) -> list[ProcessInfo]:
        """See Commands.list: there are none."""
        return []

    async def connect(self, pid: int) -> Command:
        """Raises Unsupported."""
        raise unsupported_here("commands")

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        """Raises Unsupported."""
        raise unsupported_here("commands")

    async def kill(self, pid: int) -> bool:
        """See Commands.kill: there is none."""
        return False


def unsupported_here(ability: str) -> Unsupported:
    """The error for what there is none of in this process."""
    return Unsupported(
        f"the in-memory backend has no {ability}",
        field="sandbox.backend",
        received="memory",
        fix='use the "local" backend, or tasks that need none',
    )
