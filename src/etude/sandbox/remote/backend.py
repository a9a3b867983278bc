"""A backend of a sandbox server, and its sandboxes, used as if they were here."""

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
from etude.sandbox.migration import default_state_directory, in_place_of, or_killed, transfer
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
"""Key of a sandbox's metadata: the client that it belongs to."""
_READING = frozenset(
    {"read", "list", "grep", "diff", "changed", "kinds", "pack", "processes", "lookup", "wait"}
)
"""Operations that do the same when they are done twice."""


class RemoteBackend(SandboxBackend):
    """`SandboxBackend` on a server. For one event loop.

    `close` kills the sandboxes that this client made or woke; `disconnect` lets them live.
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
        """`backend`: which of the server's; None: its first. `transport`: another way to it, for tests.

        `backoff`: of calls that may be sent twice. `owner`: names this client; what an earlier one of the
        same name, which must be dead, has left on the server is killed first of all.
        """
        self.line = Connection(url, token, transport, backoff)
        self.token = token
        self.backend = backend
        self._owner = owner
        self._capabilities: Capabilities | None = None
        self._mine: dict[str, RemoteSandbox] = {}
        self._sent: set[str] = set()
        self._once = asyncio.Lock()
        """Held while something is asked or sent that is asked or sent only once."""

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities. Known from the first `hello`, `create` or `connect` on.

        Before that it asks the server and blocks the thread meanwhile, for a few seconds at most: in an
        event loop await `hello` first. Raises SandboxLostError if the server cannot be reached.
        """
        if self._capabilities is None:
            self._capabilities = self._understood(self.line.call_now("capabilities", self._named()))
        return self._capabilities

    async def hello(self) -> Capabilities:
        """Asks the server what it can, once. Raises SandboxLostError, ConfigError for another version."""
        async with self._once:
            if self._capabilities is None:
                answer = await self.line.call("GET", "capabilities", self._named(), again=True)
                understood = self._understood(answer)
                await self._end_predecessors()
                self._capabilities = understood
            return self._capabilities

    def doctor(self) -> list[str]:
        """See SandboxBackend.doctor. What the server says of itself, or why it cannot be reached."""
        try:
            return [str(line) for line in self.line.call_now("problems")]
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
        """See SandboxBackend.create. Sent again with its key when the connection fails on the way."""
        await self.hello()
        header = {
            "backend": self.backend,
            "template": None if template is None else await self._put(template),
            "resources": None if resources is None else asdict(resources),
            "network": None if network is None else {"allow": list(network.allow)},
            "timeout_s": timeout_s,
            "snapshot": snapshot,
            "metadata": self._marked(metadata),
        }
        try:
            return await self._create(header)
        except TemplateError as error:
            if template is None or error.received != header["template"]:
                raise
            # The server has forgotten it since: it restarted, or others needed the room.
            self._sent.discard(template_key(template))
            await self._put(template)
            return await self._create(header)

    async def connect(self, sandbox_id: str) -> RemoteSandbox:
        await self.hello()
        path = f"sandboxes/{quote(sandbox_id, safe='')}/connect"
        await self.line.long("POST", path, header={}, again=True)
        return self.adopt(sandbox_id)

    async def list(self) -> list[SandboxInfo]:
        """See SandboxBackend.list. Other clients' sandboxes too."""
        rows = await self.line.call("GET", "sandboxes", self._named(), again=True)
        return self.line.decoded(lambda raw: [decode_info(row) for row in raw], rows)

    async def list_snapshots(self) -> list[SnapshotInfo]:
        rows = await self.line.call("GET", "snapshots", self._named(), again=True)
        return self.line.decoded(lambda raw: [decode_snapshot(row) for row in raw], rows)

    async def delete_snapshot(self, snapshot: str) -> None:
        await self.line.call("DELETE", f"snapshots/{quote(snapshot, safe='')}", self._named())

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        path = f"snapshots/{quote(snapshot, safe='')}/export"
        with receive_file(target) as writer:

            async def take(header: Header, piece: bytes) -> None:
                await asyncio.to_thread(writer.take, header, piece)

            await self.line.long("GET", path, self._named(), on_frame=take)
            if not writer.is_whole:
                raise self.line.lost("the stream of the file is not whole")

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        if not await asyncio.to_thread(source.is_file):
            raise SnapshotError("no such file", field="source", received=str(source), fix="name an export")
        async with contextlib.aclosing(pack_file(source)) as frames:
            value, _ = await self.line.long("POST", "snapshots/import", self._named(), payload=frames)
        return self.line.decoded(decode_snapshot, value)

    async def close(self) -> None:
        """See SandboxBackend.close. Raises SandboxError if the server did not confirm every end."""
        mine = list(self._mine.values())
        results = await asyncio.gather(*(sandbox.kill() for sandbox in mine), return_exceptions=True)
        await self.disconnect()
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            raise SandboxError(
                f"{len(failed)} sandboxes may live on: {failed[0]}",
                field="sandbox.server",
                received=self.line.url,
                fix="give sandboxes a time to live (timeout_s); they end with their server",
            ) from failed[0]

    async def disconnect(self) -> None:
        """Closes the connection; the sandboxes live on. Idempotent."""
        mine, self._mine = self._mine, {}
        for sandbox in mine.values():
            await sandbox.close()
        await self.line.close()

    def adopt(self, sandbox_id: str) -> RemoteSandbox:
        """A sandbox that the server made for this client, which now kills it when it closes."""
        if sandbox_id not in self._mine:
            self._mine[sandbox_id] = RemoteSandbox(self, sandbox_id)
        return self._mine[sandbox_id]

    def forget(self, sandbox_id: str) -> None:
        """A sandbox has ended."""
        self._mine.pop(sandbox_id, None)

    async def _create(self, header: Mapping[str, Any]) -> RemoteSandbox:
        key = {"idempotency-key": secrets.token_hex(16)}
        value, _ = await self.line.long("POST", "sandboxes", header=header, headers=key, again=True)
        return self.adopt(self.line.decoded(decode_info, value).id)

    async def _put(self, template: Template) -> str:
        """Sends a template unless the server has it; its key."""
        key = template_key(template)
        async with self._once:
            if key not in self._sent:
                body = pack(*encode_template(template))
                await self.line.call("PUT", "templates", body=body, again=True)
                self._sent.add(key)
        return key

    def owns(self, info: SandboxInfo) -> bool:
        """Whether a sandbox of the server is this client's, or one's of the same name; without a name, all
        are."""
        return self._owner is None or info.metadata.get(_OWNER) == self._owner

    def _marked(self, metadata: Mapping[str, str] | None) -> dict[str, str] | None:
        """A sandbox's metadata, with whose it is."""
        if self._owner is None:
            return None if metadata is None else dict(metadata)
        return {**(metadata or {}), _OWNER: self._owner}

    async def _end_predecessors(self) -> None:
        """Kills what a client of this name has left that died. Before this one makes anything."""
        if self._owner is None:
            return
        left = [info.id for info in await self.list() if self.owns(info)]
        await asyncio.gather(*(RemoteSandbox(self, sandbox_id).kill() for sandbox_id in left))

    def _named(self) -> dict[str, str]:
        return {} if self.backend is None else {"backend": self.backend}

    def _understood(self, answer: Any) -> Capabilities:
        if not isinstance(answer, dict) or answer.get("speaks") != SPEAKS:
            spoken = answer.get("speaks") if isinstance(answer, dict) else None
            raise ConfigError(
                f"the server speaks version {spoken} of the protocol, this client {SPEAKS}",
                field="sandbox.server",
                received=self.line.url,
                fix="use the same version of Étude on both sides",
            )
        # A request also holds the names of the files.
        most_bytes = self.line.decoded(lambda raw: int(raw["body_bytes"]) // 2, answer)
        self.line.batch_bytes = min(BATCH_BYTES, most_bytes)
        return self.line.decoded(lambda raw: decode_capabilities(raw["capabilities"]), answer)


class RemoteSandbox(Sandbox):
    """`Sandbox` over a connection."""

    def __init__(self, owner: RemoteBackend, sandbox_id: str) -> None:
        super().__init__(sandbox_id)
        self._owner = owner
        self._line = owner.line
        self._base = f"sandboxes/{quote(sandbox_id, safe='')}"
        self._outputs: dict[int, OutputStream] = {}

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """See Sandbox.call. What only reads is sent again; of a large write more than one request is made."""
        if header["op"] == "write":
            for part, data in split_write(header, payload, self._line.batch_bytes):
                await self.exchange(part, data)
            return {}, b""
        if on_output is not None and header.get("background"):
            output = OutputStream(self.exchange, header, on_output)
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
            if not num_dropped_bytes and self._outputs.get(header["pid"]) is output:
                del self._outputs[header["pid"]]  # one that lacks something tells the next who waits, too
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
        return self._line.decoded(decode_info, await self._line.call("GET", self._base, again=True))

    async def set_timeout(self, timeout_s: float | None) -> None:
        header = {"timeout_s": timeout_s}
        await self._line.call("POST", f"{self._base}/timeout", header=header, again=True)

    async def pause(self, mode: SnapshotKind = "full") -> None:
        await self._line.long("POST", f"{self._base}/pause", header={"mode": mode}, again=True)

    async def resume(self) -> None:
        await self._line.long("POST", f"{self._base}/resume", header={}, again=True)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        header = {"kind": kind, "name": name}
        value, _ = await self._line.long("POST", f"{self._base}/snapshots", header=header)
        return self._line.decoded(decode_snapshot, value)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        rows, _ = await self._line.long("POST", f"{self._base}/fork", header={"count": count})
        return [self._copy(row) for row in rows]

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate. To another server: from server to server; else by a snapshot through here."""
        if isinstance(target, RemoteBackend):
            header = {"url": target.line.url, "token": target.token, "backend": target.backend}
            value, _ = await self._line.long("POST", f"{self._base}/migrate", header=header)
            self._owner.forget(self.id)
            return target.adopt(value["id"])
        return await in_place_of(await self._copy_to(target), self.kill())

    async def kill(self) -> None:
        await self.close()
        await self._line.long("DELETE", self._base, again=True)
        self._owner.forget(self.id)

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
