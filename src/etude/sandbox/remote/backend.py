"""`RemoteBackend` and `RemoteSandbox`: the sandbox interface over a connection to a sandbox server."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from etude.errors import ConfigError, EtudeError, InfrastructureError, SandboxError
from etude.kit.retry import Backoff
from etude.sandbox.calls import Answer
from etude.sandbox.commands import process_id
from etude.sandbox.errors import SnapshotError, TemplateError
from etude.sandbox.files import split_write
from etude.sandbox.inside.frames import Header, pack
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.migration import default_state_directory, kill_on_failure, replace_source, transfer
from etude.sandbox.refusals import check_move
from etude.sandbox.remote.connection import BATCH_BYTES, RETRY, Connection, OnFrame, OutputStream
from etude.sandbox.template import Template, encode_template, template_key
from etude.sandbox.types import Capabilities, Network, Resources, SandboxInfo, SnapshotInfo, SnapshotKind
from etude.sandbox.wire_types import (
    SPEAKS,
    decode_capabilities,
    decode_error,
    decode_info,
    decode_snapshot,
    pack_file,
    receive_file,
)
from etude.serving.client import Transport

_OWNER = "owner"
"""Key of a sandbox's metadata with the client that owns it."""
_IDEMPOTENT = frozenset(
    {"read", "list", "grep", "diff", "changed", "kinds", "pack", "processes", "lookup", "wait"}
)
"""Operations that may be sent twice."""


class RemoteBackend(SandboxBackend):
    """A backend of a sandbox server. For one event loop.

    `close` kills the sandboxes that this client created or connected to; `disconnect` keeps them alive.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        backend: str | None = None,
        transport: Transport | None = None,
        backoff: Backoff = RETRY,
        owner: str | None = None,
    ) -> None:
        """`backend`: one of the server's; None: its first. `transport`: another HTTP transport, for tests.

        `backoff`: for calls that may be sent twice. `owner`: the name of this client; sandboxes of an earlier
        client of that name, which must be dead, are killed first.
        """
        self.connection = Connection(url, token, transport, backoff)
        self.token = token
        self.backend = backend
        self._owner = owner
        self._capabilities: Capabilities | None = None
        self._sandboxes: dict[str, RemoteSandbox] = {}
        self._uploaded: set[str] = set()
        """Keys of the templates that the server has."""
        self._lock = asyncio.Lock()
        """Held during `hello` and uploads of templates, which happen once."""

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities. Cached by the first `hello`, `create` or `connect`.

        Before that it queries the server and blocks the thread for up to a few seconds: in an event loop
        await `hello` first. Raises SandboxLostError if the server cannot be reached.
        """
        if self._capabilities is None:
            answer = self.connection.call_now("capabilities", self._params())
            self._capabilities = self._parse_capabilities(answer)
        return self._capabilities

    async def hello(self) -> Capabilities:
        """Queries the capabilities once. Raises SandboxLostError, ConfigError for another version."""
        async with self._lock:
            if self._capabilities is None:
                answer = await self.connection.call("GET", "capabilities", self._params(), again=True)
                capabilities = self._parse_capabilities(answer)
                await self._kill_predecessors()
                self._capabilities = capabilities
            return self._capabilities

    def doctor(self) -> list[str]:
        """See SandboxBackend.doctor. The server's problems, or why it cannot be reached."""
        try:
            return [str(line) for line in self.connection.call_now("problems")]
        except EtudeError as error:
            return [str(error)]

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> RemoteSandbox:
        """See SandboxBackend.create. Retried with the same idempotency key if the connection fails."""
        await self.hello()
        header = {
            "backend": self.backend,
            "template": None if template is None else await self._upload_template(template),
            "resources": None if resources is None else asdict(resources),
            "network": None if network is None else {"allow": list(network.allow)},
            "timeout_s": timeout_s,
            "snapshot": snapshot,
            "metadata": self._with_owner(metadata),
        }
        try:
            return await self._create(header)
        except TemplateError as error:
            if template is None or error.received != header["template"]:
                raise
            # The server has dropped the template since: it restarted, or others needed the room.
            self._uploaded.discard(template_key(template))
            await self._upload_template(template)
            return await self._create(header)

    async def connect(self, sandbox_id: str) -> RemoteSandbox:
        await self.hello()
        path = f"sandboxes/{quote(sandbox_id, safe='')}/connect"
        await self.connection.long("POST", path, header={}, again=True)
        return self.adopt(sandbox_id)

    async def list(self) -> list[SandboxInfo]:
        """See SandboxBackend.list. Includes other clients' sandboxes."""
        rows = await self.connection.call("GET", "sandboxes", self._params(), again=True)
        return self.connection.decode_with(lambda raw: [decode_info(row) for row in raw], rows)

    async def list_snapshots(self) -> list[SnapshotInfo]:
        rows = await self.connection.call("GET", "snapshots", self._params(), again=True)
        return self.connection.decode_with(lambda raw: [decode_snapshot(row) for row in raw], rows)

    async def delete_snapshot(self, snapshot: str) -> None:
        await self.connection.call("DELETE", f"snapshots/{quote(snapshot, safe='')}", self._params())

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        path = f"snapshots/{quote(snapshot, safe='')}/export"
        with receive_file(target) as writer:

            async def on_frame(header: Header, piece: bytes) -> None:
                await asyncio.to_thread(writer.write_frame, header, piece)

            await self.connection.long("GET", path, self._params(), on_frame=on_frame)
            if not writer.is_whole:
                raise self.connection.lost_error("the file's stream is incomplete")

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        if not await asyncio.to_thread(source.is_file):
            raise SnapshotError("no such file", field="source", received=str(source), fix="name an export")
        async with contextlib.aclosing(pack_file(source)) as frames:
            value, _ = await self.connection.long("POST", "snapshots/import", self._params(), payload=frames)
        return self.connection.decode_with(decode_snapshot, value)

    async def close(self) -> None:
        """See SandboxBackend.close. Raises SandboxError if the server did not confirm every end."""
        sandboxes = list(self._sandboxes.values())
        results = await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes), return_exceptions=True)
        await self.disconnect()
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            raise SandboxError(
                f"{len(failed)} sandboxes may still be running: {failed[0]}",
                field="sandbox.server",
                received=self.connection.url,
                fix="end them on the server, or give sandboxes a time to live (timeout_s)",
            ) from failed[0]

    async def disconnect(self) -> None:
        """Closes the connection; the sandboxes live on. Idempotent."""
        sandboxes, self._sandboxes = self._sandboxes, {}
        for sandbox in sandboxes.values():
            await sandbox.close()
        await self.connection.close()

    def adopt(self, sandbox_id: str) -> RemoteSandbox:
        """The handle of a sandbox that belongs to this client, and is killed by `close`."""
        if sandbox_id not in self._sandboxes:
            self._sandboxes[sandbox_id] = RemoteSandbox(self, sandbox_id)
        return self._sandboxes[sandbox_id]

    def remove(self, sandbox_id: str) -> None:
        """Removes a sandbox that has ended."""
        self._sandboxes.pop(sandbox_id, None)

    async def _create(self, header: Mapping[str, Any]) -> RemoteSandbox:
        key = {"idempotency-key": secrets.token_hex(16)}
        value, _ = await self.connection.long("POST", "sandboxes", header=header, headers=key, again=True)
        return self.adopt(self.connection.decode_with(decode_info, value).id)

    async def _upload_template(self, template: Template) -> str:
        """Uploads a template unless the server has it; its key."""
        key = template_key(template)
        async with self._lock:
            if key not in self._uploaded:
                body = pack(*encode_template(template))
                await self.connection.call("PUT", "templates", body=body, again=True)
                self._uploaded.add(key)
        return key

    def owns(self, info: SandboxInfo) -> bool:
        """Whether a sandbox belongs to a client of this name; True for all if this client has no name."""
        return self._owner is None or info.metadata.get(_OWNER) == self._owner

    def _with_owner(self, metadata: Mapping[str, str] | None) -> dict[str, str] | None:
        """A sandbox's metadata, with its owner added."""
        if self._owner is None:
            return None if metadata is None else dict(metadata)
        return {**(metadata or {}), _OWNER: self._owner}

    async def _kill_predecessors(self) -> None:
        """Kills sandboxes of a dead client of this name, before this one creates any."""
        if self._owner is None:
            return
        stale = [info.id for info in await self.list() if self.owns(info)]
        await asyncio.gather(*(RemoteSandbox(self, sandbox_id).kill() for sandbox_id in stale))

    def _params(self) -> dict[str, str]:
        return {} if self.backend is None else {"backend": self.backend}

    def _parse_capabilities(self, answer: Any) -> Capabilities:
        if not isinstance(answer, dict) or answer.get("speaks") != SPEAKS:
            spoken = answer.get("speaks") if isinstance(answer, dict) else None
            raise ConfigError(
                f"the server speaks version {spoken} of the protocol, this client {SPEAKS}",
                field="sandbox.server",
                received=self.connection.url,
                fix="use the same version of Étude on both sides",
            )
        # Half, as a request also contains the names of the files.
        most_bytes = self.connection.decode_with(lambda raw: int(raw["body_bytes"]) // 2, answer)
        self.connection.batch_bytes = min(BATCH_BYTES, most_bytes)
        return self.connection.decode_with(lambda raw: decode_capabilities(raw["capabilities"]), answer)


class RemoteSandbox(Sandbox):
    """A sandbox of a sandbox server."""

    def __init__(self, owner: RemoteBackend, sandbox_id: str) -> None:
        super().__init__(sandbox_id)
        self._owner = owner
        self._connection = owner.connection
        self._base = f"sandboxes/{quote(sandbox_id, safe='')}"
        self._outputs: dict[int, OutputStream] = {}

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """See Sandbox.call. Idempotent operations are retried; a large write is split into requests."""
        if header["op"] == "write":
            for part, data in split_write(header, payload, self._connection.batch_bytes):
                await self.exchange(part, data)
            return {}, b""
        if on_output is not None and header.get("background"):
            output = OutputStream(self.exchange, header, on_output)
            answer = await output.wait_started()
            self._outputs[process_id(answer, self.id)] = output
            return answer, b""
        num_dropped_bytes = 0

        def on_frame(frame: Header, _: bytes) -> None:
            nonlocal num_dropped_bytes
            num_dropped_bytes += int(frame.get("num_bytes", 0))

        answer, data = await self.exchange(header, payload, on_output, on_frame)
        if header["op"] == "wait" and header["pid"] in self._outputs:
            output = self._outputs[header["pid"]]
            await output.drain()
            num_dropped_bytes += output.num_dropped_bytes
            if not num_dropped_bytes and self._outputs.get(header["pid"]) is output:
                del self._outputs[header["pid"]]  # else kept, so that a later `wait` is truncated, too
        return ({**answer, "truncated": True} if num_dropped_bytes else answer), data

    async def exchange(
        self,
        header: Header,
        payload: bytes,
        on_output: OnOutput | None = None,
        on_frame: OnFrame | None = None,
    ) -> Answer:
        """Sends one call; the answer of the program inside. `on_frame`: see Connection.long."""
        value, data = await self._connection.long(
            "POST",
            f"{self._base}/call",
            header=header,
            payload=payload,
            on_output=on_output,
            on_frame=on_frame,
            again=header["op"] in _IDEMPOTENT,
        )
        return self._connection.decode_with(dict, value), data

    async def close(self) -> None:
        """Stops reading the output of background commands."""
        outputs, self._outputs = self._outputs, {}
        for output in outputs.values():
            await output.stop()

    async def get_info(self) -> SandboxInfo:
        return self._connection.decode_with(
            decode_info, await self._connection.call("GET", self._base, again=True)
        )

    async def set_timeout(self, timeout_s: float | None) -> None:
        header = {"timeout_s": timeout_s}
        await self._connection.call("POST", f"{self._base}/timeout", header=header, again=True)

    async def pause(self, mode: SnapshotKind = "full") -> None:
        await self._connection.long("POST", f"{self._base}/pause", header={"mode": mode}, again=True)

    async def resume(self) -> None:
        await self._connection.long("POST", f"{self._base}/resume", header={}, again=True)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        header = {"kind": kind, "name": name}
        value, _ = await self._connection.long("POST", f"{self._base}/snapshots", header=header)
        return self._connection.decode_with(decode_snapshot, value)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        rows, _ = await self._connection.long("POST", f"{self._base}/fork", header={"count": count})
        return [self._copy(row) for row in rows]

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate. To another server directly; else by a snapshot through this process."""
        if isinstance(target, RemoteBackend):
            header = {"url": target.connection.url, "token": target.token, "backend": target.backend}
            value, _ = await self._connection.long("POST", f"{self._base}/migrate", header=header)
            self._owner.remove(self.id)
            return target.adopt(value["id"])
        return await replace_source(await self._copy_to(target), self.kill())

    async def kill(self) -> None:
        await self.close()
        await self._connection.long("DELETE", self._base, again=True)
        self._owner.remove(self.id)

    async def _copy_to(self, target: SandboxBackend) -> Sandbox:
        here, there = await self._owner.hello(), await target.hello()
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
                # The caller gets the first error.
                await self._owner.delete_snapshot(info.id)
            raise
        return await kill_on_failure(moved, self._owner.delete_snapshot(info.id))

    def _copy(self, row: dict[str, object]) -> Sandbox | SandboxError:
        if "id" in row:
            return self._owner.adopt(str(row["id"]))
        error = decode_error(row.get("error"))
        if isinstance(error, SandboxError):
            return error
        return SandboxError(str(error), field="sandbox", received=self.id)
