"""A sandbox around another one: every call goes through `call`, and that through `reach`, which may wait,
count, refuse or fail.

Subclasses say there what their wrapping is for: one that is still being made, one that fails on
purpose, one that holds a place in a pool.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from etude.errors import AgentError, SandboxError
from etude.sandbox.interface import Command, OnOutput, Sandbox, SandboxBackend
from etude.sandbox.types import (
    CommandResult,
    FileInfo,
    GrepMatch,
    ProbeReport,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
    SnapshotKind,
    TestReport,
)

Result = TypeVar("Result")
Operation = Callable[[Sandbox], Coroutine[Any, Any, Result]]


class WrappedSandbox:
    """Implements Sandbox by `reach`, which subclasses fill in, or `call` where more than reaching is done."""

    def __init__(self) -> None:
        self.files = WrappedFiles(self)
        self.commands = WrappedCommands(self)

    @property
    def id(self) -> str:
        """See Sandbox."""
        raise NotImplementedError

    async def reach(self, operation: str) -> Sandbox:
        """The inner sandbox, for an operation such as `fork`, `files.read` or `commands.run`."""
        raise NotImplementedError

    async def call(self, name: str, operation: Operation[Result]) -> Result:
        """Carries out an operation on the inner sandbox; `name` as for `reach`."""
        return await operation(await self.reach(name))

    def wrap(self, copy: Sandbox) -> Sandbox:
        """What a copy of the inner sandbox is handed out as."""
        return copy

    async def get_info(self) -> SandboxInfo:
        """See Sandbox.get_info."""
        return await self.call("get_info", lambda s: s.get_info())

    async def set_timeout(self, timeout_s: float | None) -> None:
        """See Sandbox.set_timeout."""
        await self.call("set_timeout", lambda s: s.set_timeout(timeout_s))

    async def create_session(self, cwd: str | None = None, env: Mapping[str, str] | None = None) -> str:
        """See Sandbox.create_session."""
        return await self.call("create_session", lambda s: s.create_session(cwd, env))

    async def run_in_session(
        self, session: str, cmd: str, timeout_s: float = 30.0, limit_bytes: int = 64 << 10
    ) -> CommandResult:
        """See Sandbox.run_in_session."""
        return await self.call(
            "run_in_session", lambda s: s.run_in_session(session, cmd, timeout_s, limit_bytes)
        )

    async def close_session(self, session: str) -> None:
        """See Sandbox.close_session."""
        await self.call("close_session", lambda s: s.close_session(session))

    async def run_tests(self, paths: Sequence[str], timeout_s: float = 2.0) -> TestReport:
        """See Sandbox.run_tests."""
        return await self.call("run_tests", lambda s: s.run_tests(paths, timeout_s))

    async def run_probes(self, paths: Sequence[str], timeout_s: float = 2.0) -> ProbeReport:
        """See Sandbox.run_probes."""
        return await self.call("run_probes", lambda s: s.run_probes(paths, timeout_s))

    async def diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.diff."""
        return await self.call("diff", lambda s: s.diff())

    async def final_diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.final_diff."""
        return await self.call("final_diff", lambda s: s.final_diff())

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """See Sandbox.pause."""
        await self.call("pause", lambda s: s.pause(mode))

    async def resume(self) -> None:
        """See Sandbox.resume."""
        await self.call("resume", lambda s: s.resume())

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """See Sandbox.create_snapshot."""
        return await self.call("create_snapshot", lambda s: s.create_snapshot(kind, name))

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork."""
        copies = await self.call("fork", lambda s: s.fork(count))
        return [copy if isinstance(copy, SandboxError) else self.wrap(copy) for copy in copies]

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate."""
        return await self.call("migrate", lambda s: s.migrate(target))

    async def kill(self) -> None:
        """See Sandbox.kill."""
        await self.call("kill", lambda s: s.kill())


class WrappedFiles:
    """Files of a WrappedSandbox."""

    def __init__(self, owner: WrappedSandbox) -> None:
        self._owner = owner

    async def read(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See Files.read."""
        return await self._owner.call("files.read", lambda s: s.files.read(path, limit_bytes))

    async def read_many(
        self, paths: Sequence[str], limit_bytes: int = 1 << 20
    ) -> builtins.list[bytes | AgentError]:
        """See Files.read_many."""
        return await self._owner.call("files.read_many", lambda s: s.files.read_many(paths, limit_bytes))

    async def write(self, path: str, data: str | bytes) -> None:
        """See Files.write."""
        await self._owner.call("files.write", lambda s: s.files.write(path, data))

    async def write_many(self, files: Mapping[str, str | bytes]) -> None:
        """See Files.write_many."""
        await self._owner.call("files.write_many", lambda s: s.files.write_many(files))

    async def list(self, path: str = ".", depth: int = 1) -> list[FileInfo]:
        """See Files.list."""
        return await self._owner.call("files.list", lambda s: s.files.list(path, depth))

    async def remove(self, path: str) -> None:
        """See Files.remove."""
        await self._owner.call("files.remove", lambda s: s.files.remove(path))

    async def grep(self, pattern: str, path: str = ".", limit: int = 50) -> list[GrepMatch]:
        """See Files.grep."""
        return await self._owner.call("files.grep", lambda s: s.files.grep(pattern, path, limit))

    async def upload(self, source: Path, path: str) -> int:
        """See Files.upload."""
        return await self._owner.call("files.upload", lambda s: s.files.upload(source, path))

    async def download(self, path: str, target: Path) -> int:
        """See Files.download."""
        return await self._owner.call("files.download", lambda s: s.files.download(path, target))


class WrappedCommands:
    """Commands of a WrappedSandbox."""

    def __init__(self, owner: WrappedSandbox) -> None:
        self._owner = owner

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
        """See Commands.run."""
        return await self._owner.call(
            "commands.run", lambda s: s.commands.run(cmd, timeout_s, env, cwd, limit_bytes, stdin, on_output)
        )

    async def start(
        self,
        cmd: str,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        on_output: OnOutput | None = None,
    ) -> Command:
        """See Commands.start."""
        return await self._owner.call(
            "commands.start", lambda s: s.commands.start(cmd, timeout_s, env, cwd, limit_bytes, on_output)
        )

    async def list(self) -> list[ProcessInfo]:
        """See Commands.list."""
        return await self._owner.call("commands.list", lambda s: s.commands.list())

    async def connect(self, pid: int) -> Command:
        """See Commands.connect."""
        return await self._owner.call("commands.connect", lambda s: s.commands.connect(pid))

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        """See Commands.send_stdin."""
        await self._owner.call("commands.send_stdin", lambda s: s.commands.send_stdin(pid, data))

    async def kill(self, pid: int) -> bool:
        """See Commands.kill."""
        return await self._owner.call("commands.kill", lambda s: s.commands.kill(pid))
