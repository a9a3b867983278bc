"""A backend without processes or isolation: the workspace is a dict, tests run in this process.

For *trusted generated code only*: it generates training corpora at well under a millisecond per operation,
and replaces real sandboxes in tests. It runs tests with the same code as a real sandbox, and does not run
commands. Its snapshots live as long as the backend.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox.calls import Answer, agents_fault, prepared
from etude.sandbox.errors import (
    SandboxStateError,
    SnapshotError,
    SnapshotMissingError,
    SnapshotRefusedError,
    Unsupported,
)
from etude.sandbox.inside import testrunner
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.frames import Header, pack
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.migration import default_state_directory, transfer
from etude.sandbox.refusals import check_count, check_life, check_move, missing_sandbox, unsupported_copy
from etude.sandbox.template import Template, encode_template, unpack_templates
from etude.sandbox.types import (
    NO_NETWORK,
    Capabilities,
    Network,
    Resources,
    SandboxInfo,
    SnapshotInfo,
    SnapshotKind,
)
from etude_quickstart.memory_files import MemoryWorkspace
from etude_quickstart.memory_running import run_here


class MemorySandbox(Sandbox):
    """`Sandbox` in this process. Not isolated in any way."""

    def __init__(
        self,
        backend: MemoryBackend,
        template: Template,
        contents: dict[str, bytes],
        resources: Resources | None = None,
        metadata: Mapping[str, str] | None = None,
        parent: str | None = None,
    ) -> None:
        super().__init__(f"memory-{next(_ids)}")
        self.template = template
        self.workspace = MemoryWorkspace(contents, template.contents)
        self._operations = {
            **self.workspace.operations,
            "tests": self._run,
            "probes": self._run,
            "processes": lambda header, payload: ({"processes": []}, b""),
            "kill": lambda header, payload: ({"killed": False}, b""),
        }
        self._backend = backend
        self._timer: asyncio.TimerHandle | None = None
        self._info = SandboxInfo(
            id=self.id,
            backend="memory",
            template=template.name,
            template_digest=template.digest,
            state="running",
            resources=resources or Resources(),
            network=NO_NETWORK,
            created_s=time.time(),
            expires_s=None,
            parent=parent,
            metadata=dict(metadata or {}),
        )
        backend.live.add(self)

    async def get_info(self) -> SandboxInfo:
        return self._info

    async def set_timeout(self, timeout_s: float | None) -> None:
        """See Sandbox.set_timeout. Raises ConfigError for a timeout that is not positive."""
        check_life(timeout_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expires_s = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end)
            expires_s = time.time() + timeout_s
        self._info = replace(self._info, expires_s=expires_s)

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """See Sandbox.call. Raises Unsupported for commands.

        Tests run in this process. Their timeout needs the main thread (it is an interval timer); elsewhere
        nothing interrupts a run.
        """
        self._awake()
        ready = prepared(header, self.template.workspace, {})
        operation = self._operations.get(header["op"])
        if operation is None:
            raise unsupported_here("commands")
        try:
            return operation(ready, payload)
        except Fault as fault:
            raise agents_fault((fault.kind, fault.message), header) from fault

    def _run(self, header: Header, payload: bytes) -> Answer:
        runner = testrunner.run_test_files if header["op"] == "tests" else testrunner.run_probe_files
        run, duration_s = run_here(lambda: runner(self.workspace, header["paths"]), header["timeout_s"])
        answer = {
            "timed_out": run is None,
            "duration_s": duration_s,
            "exit_code": 0,
            "memory_exceeded": False,
        }
        return answer, json.dumps(run).encode()

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """See Sandbox.pause: there is no state but files."""
        if mode != "filesystem":
            raise unsupported_copy(self._backend.capabilities(), "pause", mode)
        self._alive()
        self._info = replace(self._info, state="paused")

    async def resume(self) -> None:
        self._alive()
        self._info = replace(self._info, state="running")

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        if kind == "full":
            raise unsupported_copy(self._backend.capabilities(), "create_snapshot", kind)
        self._awake()
        return self._backend.store_snapshot(self.template, dict(self.workspace.contents), self.id, name)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Raises ConfigError for less than one copy."""
        check_count(count)
        self._awake()
        info = self._info
        copies: list[Sandbox | SandboxError] = []
        for _ in range(count):
            contents = dict(self.workspace.contents)
            copies.append(
                MemorySandbox(self._backend, self.template, contents, info.resources, info.metadata, self.id)
            )
        return copies

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        check_move(self._backend.capabilities(), await target.hello())
        snapshot = await self.create_snapshot()
        expires_s = self._info.expires_s
        left_s = None if expires_s is None else max(0.001, expires_s - time.time())
        try:
            moved = await transfer(
                lambda file: self._backend.export_snapshot(snapshot.id, file),
                default_state_directory(),
                target,
                left_s,
            )
        finally:
            await self._backend.delete_snapshot(snapshot.id)
        await self.kill()
        return moved

    async def kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    def _end(self) -> None:
        self._info = replace(self._info, state="killed")
        self._backend.live.discard(self)

    def _alive(self) -> None:
        if self._info.state == "killed":
            raise SandboxError("the sandbox was killed", field="sandbox", received=self.id)

    def _awake(self) -> None:
        self._alive()
        if self._info.state == "paused":
            raise SandboxStateError(
                "the sandbox is paused", field="sandbox", received=self.id, fix="resume it first"
            )


@dataclass(frozen=True)
class _StoredSnapshot:
    """A snapshot in memory."""

    info: SnapshotInfo
    template: Template
    contents: dict[str, bytes]


class MemoryBackend(SandboxBackend):
    """`SandboxBackend` in this process, for trusted generated code only."""

    def __init__(self) -> None:
        self.live: set[MemorySandbox] = set()
        self._snapshots: dict[str, _StoredSnapshot] = {}

    def capabilities(self) -> Capabilities:
        files: frozenset[SnapshotKind] = frozenset({"filesystem"})
        return Capabilities(
            "memory", "none", False, False, False, files, files, "filesystem", "filesystem", False
        )

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> MemorySandbox:
        """See SandboxBackend.create. `resources` have no effect, since there are no processes."""
        check_life(timeout_s)
        if network is not None and network.allow:
            raise unsupported_here("network")
        if snapshot is not None:
            kept = self._get(snapshot)
            template, contents = kept.template, dict(kept.contents)
        else:
            template = template or Template()
            contents = dict(template.contents)
        sandbox = MemorySandbox(self, template, contents, resources, metadata, snapshot)
        await sandbox.set_timeout(timeout_s)
        return sandbox

    async def connect(self, sandbox_id: str) -> MemorySandbox:
        for sandbox in self.live:
            if sandbox.id == sandbox_id:
                await sandbox.resume()
                return sandbox
        raise missing_sandbox(sandbox_id)

    async def list(self) -> list[SandboxInfo]:
        infos = [await sandbox.get_info() for sandbox in self.live]
        return sorted(infos, key=lambda info: info.created_s)

    async def list_snapshots(self) -> list[SnapshotInfo]:
        return [kept.info for kept in self._snapshots.values()]

    async def delete_snapshot(self, snapshot: str) -> None:
        self._get(snapshot)
        del self._snapshots[snapshot]

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        kept = self._get(snapshot)
        files = Template({**kept.contents}, snapshot)
        frames = pack(*encode_template(kept.template)) + pack(*encode_template(files))
        await asyncio.to_thread(target.write_bytes, frames)

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        data = await asyncio.to_thread(source.read_bytes)
        try:
            template, files = unpack_templates(data, source.name, 2)
        except SnapshotError as error:
            raise SnapshotRefusedError(error.message, field="source", received=source.name) from error
        return self.store_snapshot(template, dict(files.contents), "", None)

    def store_snapshot(
        self, template: Template, contents: dict[str, bytes], sandbox: str, name: str | None
    ) -> SnapshotInfo:
        """Stores files as a snapshot."""
        snapshot = f"memory-snap-{next(_ids)}"
        size = sum(map(len, contents.values()))
        info = SnapshotInfo(snapshot, "filesystem", "memory", sandbox, template.name, time.time(), size, name)
        self._snapshots[snapshot] = _StoredSnapshot(info, template, contents)
        return info

    async def close(self) -> None:
        for sandbox in list(self.live):
            await sandbox.kill()

    def doctor(self) -> list[str]:
        return []

    def _get(self, snapshot: str) -> _StoredSnapshot:
        if snapshot not in self._snapshots:
            raise SnapshotMissingError("the snapshot does not exist", field="snapshot", received=snapshot)
        return self._snapshots[snapshot]


def unsupported_here(ability: str) -> Unsupported:
    """The error for an ability that this backend lacks."""
    return Unsupported(
        f"the in-memory backend has no {ability}",
        field="sandbox.backend",
        received="memory",
        fix="use another backend, or tasks that need none",
    )


_ids = itertools.count(1)
