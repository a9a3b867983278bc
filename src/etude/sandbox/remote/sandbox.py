"""One sandbox on a server."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from etude.errors import InfrastructureError, SandboxError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.migration import abilities_of, default_state_directory, in_place_of, or_killed, transfer
from etude.sandbox.refusals import check_move
from etude.sandbox.remote.commands import RemoteCommands
from etude.sandbox.remote.connection import Connection
from etude.sandbox.remote.files import RemoteFiles
from etude.sandbox.types import (
    Capabilities,
    CommandResult,
    ProbeReport,
    SandboxInfo,
    SnapshotInfo,
    SnapshotKind,
    TestReport,
)
from etude.sandbox.wire_types import (
    decode_command,
    decode_diff,
    decode_error,
    decode_info,
    decode_probes,
    decode_snapshot,
    decode_tests,
)


class Owner(ABC):
    """What a sandbox asks of its backend; a backend that another server reaches by address and token."""

    line: Connection
    token: str | None
    backend: str | None
    """Name of the backend on the server; None: its first."""

    @abstractmethod
    def adopt(self, sandbox_id: str) -> RemoteSandbox:
        """A sandbox that the server made for this client, which now kills it when it closes."""

    @abstractmethod
    def forget(self, sandbox_id: str) -> None:
        """A sandbox has ended."""

    @abstractmethod
    async def hello(self) -> Capabilities:
        """What the server can do; asked once."""

    @abstractmethod
    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        """See SandboxBackend.export_snapshot."""

    @abstractmethod
    async def delete_snapshot(self, snapshot: str) -> None:
        """See SandboxBackend.delete_snapshot."""


class RemoteSandbox:
    """`Sandbox` over a connection. Any number of calls may be in flight."""

    def __init__(self, owner: Owner, sandbox_id: str) -> None:
        self.id = sandbox_id
        self._owner = owner
        self._line = owner.line
        self._base = f"sandboxes/{quote(sandbox_id, safe='')}"
        self.files = RemoteFiles(self._line, self._base)
        self.commands = RemoteCommands(self._line, self._base)

    async def get_info(self) -> SandboxInfo:
        """See Sandbox.get_info."""
        return self._line.decoded(decode_info, await self._line.call("GET", self._base, again=True))

    async def set_timeout(self, timeout_s: float | None) -> None:
        """See Sandbox.set_timeout."""
        header = {"timeout_s": timeout_s}
        await self._line.call("POST", f"{self._base}/timeout", header=header, again=True)

    async def create_session(self, cwd: str | None = None, env: Mapping[str, str] | None = None) -> str:
        """See Sandbox.create_session."""
        header = {"cwd": cwd, "env": dict(env or {})}
        answer = await self._line.call("POST", f"{self._base}/sessions", header=header)
        return str(answer["session"])

    async def run_in_session(
        self, session: str, cmd: str, timeout_s: float = 30.0, limit_bytes: int = 64 << 10
    ) -> CommandResult:
        """See Sandbox.run_in_session."""
        header = {"cmd": cmd, "timeout_s": timeout_s, "limit_bytes": limit_bytes}
        path = f"{self._base}/sessions/{quote(session, safe='')}/run"
        return self._line.decoded(decode_command, await self._line.long("POST", path, header=header))

    async def close_session(self, session: str) -> None:
        """See Sandbox.close_session."""
        path = f"{self._base}/sessions/{quote(session, safe='')}"
        await self._line.call("DELETE", path, again=True)

    async def run_tests(self, paths: Sequence[str], timeout_s: float = 2.0) -> TestReport:
        """See Sandbox.run_tests."""
        header = {"paths": list(paths), "timeout_s": timeout_s}
        value, _ = await self._line.long("POST", f"{self._base}/tests", header=header)
        return self._line.decoded(decode_tests, value)

    async def run_probes(self, paths: Sequence[str], timeout_s: float = 2.0) -> ProbeReport:
        """See Sandbox.run_probes."""
        header = {"paths": list(paths), "timeout_s": timeout_s}
        value, _ = await self._line.long("POST", f"{self._base}/probes", header=header)
        return self._line.decoded(decode_probes, value)

    async def diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.diff."""
        answer = await self._line.long("GET", f"{self._base}/diff", again=True)
        return self._line.decoded(decode_diff, answer)

    async def final_diff(self) -> Mapping[str, bytes | None]:
        """See Sandbox.final_diff."""
        answer = await self._line.long("POST", f"{self._base}/final_diff", again=True)
        return self._line.decoded(decode_diff, answer)

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """See Sandbox.pause."""
        await self._line.long("POST", f"{self._base}/pause", header={"mode": mode}, again=True)

    async def resume(self) -> None:
        """See Sandbox.resume."""
        await self._line.long("POST", f"{self._base}/resume", header={}, again=True)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """See Sandbox.create_snapshot."""
        header = {"kind": kind, "name": name}
        value, _ = await self._line.long("POST", f"{self._base}/snapshots", header=header)
        return self._line.decoded(decode_snapshot, value)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork."""
        rows, _ = await self._line.long("POST", f"{self._base}/fork", header={"count": count})
        return [self._copy(row) for row in rows]

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate. To another server: from server to server; else by a snapshot through here."""
        if isinstance(target, Owner):
            header = {"url": target.line.url, "token": target.token, "backend": target.backend}
            value, _ = await self._line.long("POST", f"{self._base}/migrate", header=header)
            self._owner.forget(self.id)
            return target.adopt(value["id"])
        return await in_place_of(await self._copy_to(target), self.kill())

    async def kill(self) -> None:
        """See Sandbox.kill."""
        await self.commands.close()
        await self._line.long("DELETE", self._base, again=True)
        self._owner.forget(self.id)

    async def _copy_to(self, target: SandboxBackend) -> Sandbox:
        here, there = await self._owner.hello(), await abilities_of(target)
        check_move(here, there)
        same = "full" in here.snapshots & there.snapshots
        expires_s = (await self.get_info()).expires_s
        left_s = None if expires_s is None else max(0.001, expires_s - time.time())
        info = await self.create_snapshot("full" if same else "filesystem")
        try:
            moved = await transfer(
                lambda file: self._owner.export_snapshot(info.id, file),
                default_state_directory(),
                target,
                left_s,
            )
        except BaseException:
            with contextlib.suppress(InfrastructureError):
                # What went wrong first is what the caller must hear.
                await self._owner.delete_snapshot(info.id)
            raise
        return await or_killed(moved, self._owner.delete_snapshot(info.id))

    def _copy(self, row: dict[str, object]) -> Sandbox | SandboxError:
        if "id" in row:
            return self._owner.adopt(str(row["id"]))
        error = decode_error(row.get("error"))
        if isinstance(error, SandboxError):
            return error
        return SandboxError(str(error), field="sandbox", received=self.id)
