"""A backend in front of another one: a bounded number of live sandboxes, and fair turns.

    create ──> queue of tenants (waiting.py) ──> a place ──> the inner backend

A place is held by every sandbox that lives: created, forked, resumed. A paused one gives its place back, and
takes another when it wakes. The pool is the inner backend's only user.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.tasks import Tasks, to_the_end
from etude.sandbox.errors import CapacityError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.refusals import check_count, missing_sandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Capabilities, Network, Resources, SandboxInfo, SnapshotInfo, SnapshotKind
from etude.sandbox.waiting import WaitingLine
from etude.sandbox.wrapping import WrappedSandbox

LOOK_S = 0.25
"""How often, while somebody waits, the pool looks for sandboxes that ended by themselves."""
TENANT = "tenant"
"""The key of a sandbox's metadata that says whose turn it takes."""


class PooledBackend(SandboxBackend):
    """`SandboxBackend` over another one, which it owns and closes. For one event loop."""

    def __init__(self, inner: SandboxBackend, max_live: int, queue_timeout_s: float = 60.0) -> None:
        """`max_live`: places; `queue_timeout_s`: the longest that a call waits for one."""
        self.inner = inner
        self.max_live = max_live
        self.queue_timeout_s = queue_timeout_s
        self.problems: deque[str] = deque(maxlen=8)
        """What went wrong lately behind the scenes."""
        self._live: dict[str, PooledSandbox] = {}
        self._holders: set[str] = set()
        """Ids of those that hold a place."""
        self._num_beginning = 0
        """Places of sandboxes that are being made or woken."""
        self._line = WaitingLine(self._take, self._give_back)
        self._looker: asyncio.Task[None] | None = None
        self._background = Tasks(on_error=lambda error: self.problems.append(str(error)))
        self._closed = False

    @property
    def held(self) -> int:
        """Places that are held."""
        return len(self._holders) + self._num_beginning

    @property
    def waiting(self) -> Mapping[str, int]:
        """Tenant -> calls in the queue."""
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
        """See SandboxBackend.connect. Resuming a paused one takes a place."""
        await self._look()
        if sandbox_id not in self._live:
            raise missing_sandbox(sandbox_id)
        sandbox = self._live[sandbox_id]
        await sandbox.resume()
        return sandbox

    async def list(self) -> list[SandboxInfo]:
        infos = await self._look()
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
        """See SandboxBackend.close. Callers that wait in the queue get a SandboxError."""
        self._closed = True
        self._line.refuse_all(_closed_error())
        await self._background.close()
        await self.inner.close()

    # What its sandboxes ask of it

    @asynccontextmanager
    async def places(self, tenant: str, num: int = 1) -> AsyncIterator[None]:
        """Waits for places, which are held during the block: for what begins there. Raises CapacityError."""
        if self._closed:
            raise _closed_error()
        if num > self.max_live:
            raise CapacityError(
                f"there are {self.max_live} places in all",
                field="pool.max_live",
                received=num,
                fix=f"ask for {self.max_live} at most, or raise max_live",
            )
        if self.held + num > self.max_live and (self._looker is None or self._looker.done()):
            self._looker = self._background.start(self._look_while_waiting())
        try:
            await self._line.wait(num, self.queue_timeout_s, tenant)
        except TimeoutError as error:
            waiting = ", ".join(f"{name}: {count}" for name, count in self.waiting.items()) or "none"
            raise CapacityError(
                f"no place became free in {self.queue_timeout_s:g} s: {self.held} of {self.max_live} are "
                f"held, others that wait: {waiting}",
                field="pool.max_live",
                received=num,
                fix="kill or pause sandboxes, raise max_live, or wait longer (queue_timeout_s)",
            ) from error
        try:
            yield
        finally:
            self._give_back(num)
            self._line.serve()

    def adopt(self, inner: Sandbox) -> PooledSandbox:
        """A sandbox of the inner backend that lives from now on."""
        sandbox = self._live[inner.id] = PooledSandbox(self, inner)
        self._holders.add(inner.id)
        return sandbox

    def awake(self, sandbox: PooledSandbox) -> None:
        """A sandbox runs again."""
        self._holders.add(sandbox.id)

    def asleep(self, sandbox: PooledSandbox) -> None:
        """A sandbox does not run any more: its place is free."""
        self._holders.discard(sandbox.id)
        self._line.serve()

    def ended(self, sandbox: PooledSandbox) -> None:
        """A sandbox is gone."""
        self._live.pop(sandbox.id, None)
        self.asleep(sandbox)

    def _take(self, num: int) -> int | None:
        if self.held + num > self.max_live:
            return None
        self._num_beginning += num
        return num

    def _give_back(self, num: int) -> None:
        self._num_beginning -= num

    async def _look_while_waiting(self) -> None:
        while len(self._line) and not self._closed:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> list[SandboxInfo]:
        """Takes back the places of sandboxes that ended or died by themselves. What the inner backend has."""
        before = set(self._live)
        infos = await self.inner.list()
        running = {info.id for info in infos if info.state == "running"}
        for gone in before - {info.id for info in infos}:
            self._live.pop(gone, None)
        self._holders = (self._holders - before) | (before & running & self._live.keys())
        self._line.serve()
        return infos


class PooledSandbox(WrappedSandbox):
    """`Sandbox` that holds a place while it runs."""

    def __init__(self, pool: PooledBackend, inner: Sandbox) -> None:
        super().__init__(inner.id)
        self._pool = pool
        self._inner = inner
        self._waking = asyncio.Lock()

    async def reach(self, operation: str) -> Sandbox:
        return self._inner

    async def pause(self, mode: SnapshotKind = "full") -> None:
        """See Sandbox.pause. The place is given back."""
        await self._inner.pause(mode)
        self._pool.asleep(self)

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
                self._pool.awake(self)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Waits for `count` places together. Raises CapacityError."""
        check_count(count)
        async with self._pool.places(await self._tenant(), count):
            copies = await self._inner.fork(count)
            return [copy if isinstance(copy, SandboxError) else self._pool.adopt(copy) for copy in copies]

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        moved = await self._inner.migrate(target)
        self._pool.ended(self)
        return moved

    async def kill(self) -> None:
        """See Sandbox.kill. The place is given back once the inner sandbox is dead."""
        await to_the_end(self._kill())

    async def _kill(self) -> None:
        await self._inner.kill()
        self._pool.ended(self)

    async def _tenant(self) -> str:
        return (await self.get_info()).metadata.get(TENANT, "")


def _closed_error() -> SandboxError:
    return SandboxError("the pool is closed", field="sandbox.backend", fix="open another one")
