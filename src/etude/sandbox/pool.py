"""A backend in front of another one: a bounded number of live sandboxes, and fair turns.

    create ──> queue of tenants (places.py) ──> a place ──> the inner backend

A place is held by every sandbox that lives: created, forked, resumed. A paused one gives its place back, and
takes another when it wakes. The pool is the inner backend's only user.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.tasks import Tasks
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.places import Places
from etude.sandbox.pooled import TENANT, PooledSandbox
from etude.sandbox.refusals import missing_sandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Capabilities, Network, Resources, SandboxInfo, SnapshotInfo

EXPIRY_SLACK_S = 0.1
"""How long after its time to live a sandbox's place is looked after: the inner backend kills it first."""
LOOK_S = 1.0
"""How often, while somebody waits, the pool looks for sandboxes that died by themselves."""


@dataclass(frozen=True)
class PoolHealth:
    """What a pool is doing."""

    max_live: int
    live: int
    """Places held."""
    waiting: Mapping[str, int]
    """Tenant -> calls in the queue."""
    problems: tuple[str, ...]
    """What went wrong lately behind the scenes."""


class PooledBackend(SandboxBackend):
    """`SandboxBackend` over another one, which it owns and closes. For one event loop."""

    def __init__(self, inner: SandboxBackend, max_live: int, queue_timeout_s: float = 60.0) -> None:
        """`max_live`: places; `queue_timeout_s`: the longest that a call waits for one."""
        self.inner = inner
        self.queue_timeout_s = queue_timeout_s
        self.places = Places(max_live)
        self._live: dict[str, PooledSandbox] = {}
        self._looker: asyncio.Task[None] | None = None
        self._mishaps: deque[str] = deque(maxlen=8)
        self._background = Tasks(on_error=lambda error: self._mishaps.append(str(error)))
        self._closed = False

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def doctor(self) -> list[str]:
        return self.inner.doctor()

    def health(self) -> PoolHealth:
        """What the pool is doing now."""
        places = self.places
        return PoolHealth(places.total, places.held, places.queue.by_tenant(), tuple(self._mishaps))

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> PooledSandbox:
        """See SandboxBackend.create. Waits in the queue of `metadata["tenant"]`. Raises CapacityError."""
        self._check_open()
        await self.acquire((metadata or {}).get(TENANT, ""))
        try:
            inner = await self.inner.create(template, resources, network, timeout_s, snapshot, metadata)
        except BaseException:
            self.give_back()
            raise
        return self.adopt(inner, metadata if snapshot is None else None, timeout_s)

    async def connect(self, sandbox_id: str) -> PooledSandbox:
        """See SandboxBackend.connect. Resuming a paused one takes a place."""
        if sandbox_id in self._live:
            await self._live[sandbox_id].look()
        if sandbox_id not in self._live:
            raise missing_sandbox(sandbox_id)
        sandbox = self._live[sandbox_id]
        await sandbox.resume()
        return sandbox

    async def list(self) -> list[SandboxInfo]:
        infos = await self.inner.list()
        return [self._live[info.id].described(info) for info in infos if info.id in self._live]

    async def list_snapshots(self) -> list[SnapshotInfo]:
        return await self.inner.list_snapshots()

    async def delete_snapshot(self, snapshot: str) -> None:
        await self.inner.delete_snapshot(snapshot)

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        await self.inner.export_snapshot(snapshot, target)

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        return await self.inner.import_snapshot(source)

    async def close(self) -> None:
        """See SandboxBackend.close. Whoever waits in the queue gets a SandboxError."""
        self._closed = True
        self.places.refuse_all(_closed_error)
        await self._background.close()
        await self.inner.close()

    # What its sandboxes ask of it

    async def acquire(self, tenant: str, num: int = 1) -> None:
        """Waits for places. Raises CapacityError."""
        self._check_open()
        if num > self.places.free and (self._looker is None or self._looker.done()):
            self._looker = self._background.start(self._look_while_waiting())
        await self.places.acquire(tenant, num, self.queue_timeout_s)

    def adopt(
        self, inner: Sandbox, metadata: Mapping[str, str] | None, timeout_s: float | None = None
    ) -> PooledSandbox:
        """A live sandbox of the inner backend for which a place is held; the place is now the sandbox's."""
        sandbox = PooledSandbox(self, inner, metadata)
        self._live[sandbox.id] = sandbox
        self.expect_end(timeout_s)
        return sandbox

    def forget(self, sandbox: PooledSandbox) -> None:
        """A sandbox has ended."""
        self._live.pop(sandbox.id, None)

    def give_back(self, num: int = 1) -> None:
        """Places that are no longer held."""
        self.places.release(num)

    def expect_end(self, timeout_s: float | None) -> None:
        """Looks after the places once a time to live is over."""
        if timeout_s is None or self._closed:
            return
        loop = asyncio.get_running_loop()
        loop.call_later(
            timeout_s + EXPIRY_SLACK_S, lambda: self._closed or self._background.start(self._look())
        )

    async def _look_while_waiting(self) -> None:
        while len(self.places.queue) and not self._closed:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        """Takes back the places of sandboxes that ended by themselves."""
        for sandbox in list(self._live.values()):
            await sandbox.look()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()


def _closed_error() -> SandboxError:
    return SandboxError("the pool is closed", field="sandbox.backend", fix="open another one")
