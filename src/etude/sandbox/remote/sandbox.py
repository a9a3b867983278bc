"""One sandbox on a server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from pathlib import Path
from urllib.parse import quote

from etude.errors import EtudeError, InfrastructureError, SandboxError
from etude.sandbox.calls import Answer
from etude.sandbox.commands import process_id
from etude.sandbox.files import split_write
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.migration import abilities_of, default_state_directory, in_place_of, or_killed, transfer
from etude.sandbox.refusals import check_move
from etude.sandbox.remote.connection import Connection, OnFrame
from etude.sandbox.types import Capabilities, SandboxInfo, SnapshotInfo, SnapshotKind
from etude.sandbox.wire_types import decode_error, decode_info, decode_snapshot

_LAST_OUTPUT_S = 30.0
"""How long the rest of a command's output may take once its end is known."""
_READING = frozenset({"read", "list", "grep", "diff", "processes", "lookup", "wait", "shell.close"})
"""Operations that do the same when they are done twice."""


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


class _Output:
    """The output of a background command as it comes, read by a task of its own."""

    def __init__(self, sandbox: RemoteSandbox, header: Header, on_output: OnOutput) -> None:
        self._started: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
        self.num_dropped_bytes = 0
        self._task = asyncio.ensure_future(self._read(sandbox, header, on_output))

    async def started(self) -> Header:
        """What the program inside answered to the start. Raises what kept it from starting."""
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def drain(self) -> None:
        """Waits for the last output of a command that has ended."""
        await asyncio.wait({self._task}, timeout=_LAST_OUTPUT_S)
        await self.stop()

    async def stop(self) -> None:
        """Reads no more."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def take(self, frame: Header, payload: bytes) -> None:
        """One frame that is no output."""
        if frame.get("event") == "started" and not self._started.done():
            self._started.set_result(frame["value"])
        elif frame.get("event") == "dropped":
            self.num_dropped_bytes += int(frame["num_bytes"])

    async def _read(self, sandbox: RemoteSandbox, header: Header, on_output: OnOutput) -> None:
        try:
            await sandbox.exchange(header, b"", on_output, self.take)
        except EtudeError as error:
            # Once the command runs, `wait` is where a lost server shows.
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._started.cancel()


class RemoteSandbox(Sandbox):
    """`Sandbox` over a connection."""

    def __init__(self, owner: Owner, sandbox_id: str) -> None:
        super().__init__(sandbox_id)
        self._owner = owner
        self._line = owner.line
        self._base = f"sandboxes/{quote(sandbox_id, safe='')}"
        self._outputs: dict[int, _Output] = {}

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """See Sandbox.call. What only reads is sent again; of a large write more than one request is made."""
        if header["op"] == "write":
            for part, data in split_write(header, payload, self._line.batch_bytes):
                await self.exchange(part, data)
            return {}, b""
        if on_output is not None and header.get("background"):
            output = _Output(self, header, on_output)
            answer = await output.started()
            self._outputs[process_id(answer, self.id)] = output
            return answer, b""
        num_dropped_bytes = 0

        def take(frame: Header, _: bytes) -> None:
            nonlocal num_dropped_bytes
            num_dropped_bytes += int(frame.get("num_bytes", 0))

        answer, data = await self.exchange(header, payload, on_output, take)
        if header["op"] == "wait" and header["pid"] in self._outputs:
            output = self._outputs[header["pid"]]
            await output.drain()
            num_dropped_bytes += output.num_dropped_bytes
        return ({**answer, "truncated": True} if num_dropped_bytes else answer), data

    async def exchange(
        self,
        header: Header,
        payload: bytes,
        on_output: OnOutput | None = None,
        on_frame: OnFrame | None = None,
    ) -> Answer:
        """One request; the answer of the program inside. `on_frame`: see Connection.long."""
        value, data = await self._line.long(
            "POST",
            f"{self._base}/call",
            header=header,
            payload=payload,
            on_output=on_output,
            on_frame=on_frame,
            again=header["op"] in _READING,
        )
        return self._line.decoded(dict, value), data

    async def close(self) -> None:
        """Reads no more output of background commands."""
        outputs, self._outputs = self._outputs, {}
        for output in outputs.values():
            await output.stop()

    async def get_info(self) -> SandboxInfo:
        """See Sandbox.get_info."""
        return self._line.decoded(decode_info, await self._line.call("GET", self._base, again=True))

    async def set_timeout(self, timeout_s: float | None) -> None:
        """See Sandbox.set_timeout."""
        header = {"timeout_s": timeout_s}
        await self._line.call("POST", f"{self._base}/timeout", header=header, again=True)

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
        await self.close()
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
