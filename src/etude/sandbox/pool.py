"""A backend that wraps another one and limits its live sandboxes, with a queue that is fair to tenants.

    create ──> queue of tenants (waiting.py) ──> a place ──> the inner backend

Every running sandbox (created, forked, resumed) holds a place. Pausing releases the place, resuming waits for
one. The pool is the inner backend's only user.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.tasks import Tasks, finish_despite_cancel
from etude.sandbox.errors import CapacityError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.refusals import check_count, missing_sandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Capabilities, Network, Resources, SandboxInfo, SnapshotInfo, SnapshotKind
from etude.sandbox.waiting import WaitingLine
from etude.sandbox.wrapping import WrappedSandbox

POLL_S = 0.25
"""How often, while calls wait, the pool checks for sandboxes that ended by themselves."""
TENANT = "tenant"
"""The key of a sandbox's metadata with the tenant that it counts for in the queue."""


class PooledBackend(SandboxBackend):
    """`SandboxBackend` over another one, which it owns and closes. For one event loop."""

    def __init__(self, inner: SandboxBackend, max_live: int, queue_timeout_s: float = 60.0) -> None:
        """`max_live`: number of places; `queue_timeout_s`: longest wait for one."""
        self.inner = inner
        self.max_live = max_live
        self.queue_timeout_s = queue_timeout_s
        self.problems: deque[str] = deque(maxlen=8)
        """Recent errors of background tasks."""
        self._live: dict[str, PooledSandbox] = {}
        self._holders: set[str] = set()
        """Ids of the sandboxes that hold a place."""
        self._num_starting = 0
        """Places reserved for sandboxes that are being created or resumed."""
        self._line = WaitingLine(self._reserve, self._release)
        self._poller: asyncio.Task[None] | None = None
        self._background = Tasks(on_error=lambda error: self.problems.append(str(error)))
        self._closed = False

    @property
    def num_held(self) -> int:
        """Number of occupied and reserved places."""
        return len(self._holders) + self._num_starting

    @property
    def waiting(self) -> Mapping[str, int]:
        """Tenant -> number of queued calls."""
        return self._line.by_tenant()

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def doctor(self) -> list[str]:
        return self.inner.doctor()

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
        async with self.places((metadata or {}).get(TENANT, "")):
            inner = await self.inner.create(template, resources, network, timeout_s, snapshot, metadata)
            return self.adopt(inner)

    async def connect(self, sandbox_id: str) -> PooledSandbox:
        """See SandboxBackend.connect. Resuming a paused one waits for a place."""
        await self._refresh()
        if sandbox_id not in self._live:
            raise missing_sandbox(sandbox_id)
        sandbox = self._live[sandbox_id]
        await sandbox.resume()
        return sandbox

    async def list(self) -> list[SandboxInfo]:
        infos = await self._refresh()
        return [info for info in infos if info.id in self._live]

    async def list_snapshots(self) -> list[SnapshotInfo]:
        return await self.inner.list_snapshots()

    async def delete_snapshot(self, snapshot: str) -> None:
        await self.inner.delete_snapshot(snapshot)

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        await self.inner.export_snapshot(snapshot, target)

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        return await self.inner.import_snapshot(source)

    async def close(self) -> None:
        """See SandboxBackend.close. Queued callers get a SandboxError."""
        self._closed = True
        self._line.refuse_all(_closed_error())
        await self._background.close()
        await self.inner.close()

    # Called by its sandboxes

    @asynccontextmanager
    async def places(self, tenant: str, num: int = 1) -> AsyncIterator[None]:
        """Waits for places and reserves them for the block, which starts sandboxes. Raises CapacityError."""
        if self._closed:
            raise _closed_error()
        if num > self.max_live:
            raise CapacityError(
                f"there are {self.max_live} places in all",
                field="pool.max_live",
                received=num,
                fix=f"ask for {self.max_live} at most, or raise max_live",
            )
        if self.num_held + num > self.max_live and (self._poller is None or self._poller.done()):
            self._poller = self._background.start(self._refresh_while_waiting())
        try:
            await self._line.wait(num, self.queue_timeout_s, tenant)
        except TimeoutError as error:
            waiting = ", ".join(f"{name}: {count}" for name, count in self.waiting.items()) or "none"
            raise CapacityError(
                f"no place became free in {self.queue_timeout_s:g} s: {self.num_held} of {self.max_live} are "
                f"held, others that wait: {waiting}",
                field="pool.max_live",
                received=num,
                fix="kill or pause sandboxes, raise max_live, or wait longer (queue_timeout_s)",
            ) from error
        try:
            yield
        finally:
            self._release(num)
            self._line.serve()

    def adopt(self, inner: Sandbox) -> PooledSandbox:
        """Registers a new running sandbox of the inner backend."""
        sandbox = self._live[inner.id] = PooledSandbox(self, inner)
        self._holders.add(inner.id)
        return sandbox

    def on_resumed(self, sandbox: PooledSandbox) -> None:
        """Records that a sandbox runs again and holds a place."""
        self._holders.add(sandbox.id)

    def on_paused(self, sandbox: PooledSandbox) -> None:
        """Frees the place of a sandbox that does not run any more."""
        self._holders.discard(sandbox.id)
        self._line.serve()

    def on_ended(self, sandbox: PooledSandbox) -> None:
        """Removes a sandbox that has ended, and frees its place."""
        self._live.pop(sandbox.id, None)
        self.on_paused(sandbox)

    def _reserve(self, num: int) -> int | None:
        if self.num_held + num > self.max_live:
            return None
        self._num_starting += num
        return num

    def _release(self, num: int) -> None:
        self._num_starting -= num

    async def _refresh_while_waiting(self) -> None:
        while len(self._line) and not self._closed:
            await asyncio.sleep(POLL_S)
            await self._refresh()

    async def _refresh(self) -> list[SandboxInfo]:
        """Lists the inner backend's sandboxes, and frees the places of those that ended by themselves."""
        before = set(self._live)
        infos = await self.inner.list()
        running = {info.id for info in infos if info.state == "running"}
        for gone in before - {info.id for info in infos}:
            self._live.pop(gone, None)
        self._holders = (self._holders - before) | (before & running & self._live.keys())
        self._line.serve()
        return infos


class PooledSandbox(WrappedSandbox):
    """A sandbox that holds a place of the pool while it runs."""

    def __init__(self, pool: PooledBackend, inner: Sandbox) -> None:
        super().__init__(inner.id)
        self._pool = pool
        self._inner = inner
        self._waking = asyncio.Lock()

    async def reach(self, operation: str) -> Sandbox:
        return self._inner

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """See Sandbox.pause. Releases the place."""
        await self._inner.pause(mode)
        self._pool.on_paused(self)

    async def resume(self) -> None:
        """See Sandbox.resume. Waits for a place. Raises CapacityError."""
        async with self._waking:
            if (await self._inner.get_info()).state != "paused":
                await self._inner.resume()
                return
            async with self._pool.places(await self._tenant()):
                if (await self._inner.get_info()).state == "killed":  # while it waited
                    raise missing_sandbox(self.id)
                await self._inner.resume()
                self._pool.on_resumed(self)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Waits for `count` places at once. Raises CapacityError."""
        check_count(count)
        async with self._pool.places(await self._tenant(), count):
            copies = await self._inner.fork(count)
            return [copy if isinstance(copy, SandboxError) else self._pool.adopt(copy) for copy in copies]

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        moved = await self._inner.migrate(target)
        self._pool.on_ended(self)
        return moved

    async def kill(self) -> None:
        """See Sandbox.kill. Releases the place once the inner sandbox is dead."""
        await finish_despite_cancel(self._kill())

    async def _kill(self) -> None:
        await self._inner.kill()
        self._pool.on_ended(self)

    async def _tenant(self) -> str:
        return (await self.get_info()).metadata.get(TENANT, "")


def _closed_error() -> SandboxError:
    return SandboxError("the pool is closed", field="sandbox.backend", fix="open another one")
