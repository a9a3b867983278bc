"""A host for fleet tests: sandboxes that are dicts, and everything that can go wrong with a host."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from etude.errors import SandboxError
from etude.sandbox.calls import Answer
from etude.sandbox.errors import PathMissingError, SandboxMissingError
from etude.sandbox.fleet.hosts import Pressure
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import OnOutput, Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import (
    NO_NETWORK,
    Capabilities,
    Network,
    Resources,
    SandboxInfo,
    SnapshotInfo,
    SnapshotKind,
)

_ids = itertools.count(1)


class FakeSandbox(Sandbox):
    """Just enough of `Sandbox`: files are read and written."""

    def __init__(self, backend: FakeHost, info: SandboxInfo, contents: dict[str, bytes]) -> None:
        super().__init__(info.id)
        self.backend = backend
        self.info = info
        self.contents = contents
        backend.live[self.id] = self

    async def call(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        await self.backend.answer()
        self.check()
        if header["op"] == "write":
            ((path, _),) = header["files"]
            self.contents[path] = payload
            return {}, b""
        assert header["op"] == "read"
        path = header["path"]
        if path not in self.contents:
            raise PathMissingError("no such file", field="path", received=path)
        return {}, self.contents[path]

    async def set_timeout(self, timeout_s: float | None) -> None:
        raise NotImplementedError

    def check(self) -> None:
        if self.id not in self.backend.live:
            raise SandboxMissingError("no such sandbox", field="sandbox", received=self.id)

    async def get_info(self) -> SandboxInfo:
        await self.backend.answer()
        return self.info

    async def pause(self, mode: SnapshotKind = "full") -> None:
        await self.backend.answer()
        self.info = replace(self.info, state="paused")

    async def resume(self) -> None:
        self.info = replace(self.info, state="running")

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        info = SnapshotInfo(f"snap-{next(_ids)}", "filesystem", "fake", self.id, "t", time.time(), 1, name)
        self.backend.snapshots[info.id] = (info, dict(self.contents))
        return info

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        await self.backend.answer()
        copies: list[Any] = [
            await self.backend.create(Template(dict(self.contents)), self.info.resources)
            for _ in range(count)
        ]
        return copies

    async def migrate(self, target: SandboxBackend) -> Any:
        await self.backend.answer()
        self.check()
        moved = await target.create(Template(dict(self.contents)), self.info.resources)
        await self.kill()
        return moved

    async def kill(self) -> None:
        await self.backend.answer()
        self.backend.live.pop(self.id, None)


class FakeHost:
    """A backend whose behaviour a test sets. Also its own probe."""

    def __init__(self, can_migrate: bool = True) -> None:
        self.live: dict[str, FakeSandbox] = {}
        self.snapshots: dict[str, tuple[SnapshotInfo, dict[str, bytes]]] = {}
        self.can_migrate = can_migrate
        self.hung = False
        """Answers nothing and ignores cancellation, as a machine that has lost its power."""
        self.refuses: Exception | None = None
        """Raised by every `create`."""
        self.create_s = 0.0
        self.creates = 0
        self.closed = False
        self.measured: Pressure | None = None
        self._power = asyncio.Event()

    async def answer(self) -> None:
        while self.hung:
            try:
                await asyncio.wait_for(self._power.wait(), 0.02)
            except TimeoutError:
                continue
            except asyncio.CancelledError:
                if not self.hung:
                    raise

    async def pressure(self) -> Pressure | None:
        await self.answer()
        return self.measured

    def capabilities(self) -> Capabilities:
        kinds: frozenset[SnapshotKind] = frozenset(("filesystem",))
        migrate = "filesystem" if self.can_migrate else None
        return Capabilities("fake", "none", False, False, True, kinds, kinds, "filesystem", migrate)

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Any:
        self.creates += 1
        await self.answer()
        if self.create_s:
            await asyncio.sleep(self.create_s)
        if self.refuses is not None:
            raise self.refuses
        contents = dict(template.contents) if template is not None else {}
        if snapshot is not None:
            contents = dict(self.snapshots[snapshot][1])
        info = SandboxInfo(
            f"fake-{next(_ids)}",
            "fake",
            "t",
            "",
            "running",
            resources or Resources(),
            network or NO_NETWORK,
            time.time(),
            None,
        )
        return FakeSandbox(self, info, contents)

    async def connect(self, sandbox_id: str) -> Any:
        await self.answer()
        if sandbox_id not in self.live:
            raise SandboxMissingError("no such sandbox", field="sandbox", received=sandbox_id)
        sandbox = self.live[sandbox_id]
        await sandbox.resume()
        return sandbox

    async def list(self) -> Sequence[SandboxInfo]:
        await self.answer()
        return [sandbox.info for sandbox in self.live.values()]

    async def list_snapshots(self) -> Sequence[SnapshotInfo]:
        return [info for info, _ in self.snapshots.values()]

    async def delete_snapshot(self, snapshot: str) -> None:
        del self.snapshots[snapshot]

    async def close(self) -> None:
        self.closed = True
        self.live.clear()

    def doctor(self) -> Sequence[str]:
        return ["is no real host"]


class SleeplessHost(FakeHost):
    """Can neither pause nor migrate."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), pause=frozenset(), migrate=None)
