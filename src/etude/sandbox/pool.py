"""A backend in front of another one: a bounded number of live sandboxes, fair turns, some made ahead.

    create ──> a warm one of that template? ──yes──> handed out, its place with it; refilled behind
                     │ no
                     └──> queue of tenants (places.py) ──> a place ──> the inner backend

A place is held by every sandbox that lives: handed out, warm, forked, resumed. A paused one gives its
place back, and takes another when it wakes. Warm ones are made only of places that nobody waits for,
and they go first when somebody does. The pool is the inner backend's only user.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import EtudeError, SandboxError
from etude.kit.retry import Backoff
from etude.kit.tasks import Tasks
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.places import Places
from etude.sandbox.pooled import TENANT, PooledSandbox
from etude.sandbox.refusals import missing_sandbox
from etude.sandbox.template import Template
from etude.sandbox.types import NO_NETWORK, Capabilities, Network, Resources, SandboxInfo, SnapshotInfo

EXPIRY_SLACK_S = 0.1
"""How long after its time to live a sandbox's place is looked after: the inner backend kills it first."""
LOOK_S = 1.0
"""How often, while somebody waits, the pool looks for sandboxes that died by themselves."""
FIRST_RETRY_S = 1.0
_RETRY = Backoff(FIRST_RETRY_S, most_s=60.0)


@dataclass(frozen=True)
class PoolHealth:
    """What a pool is doing."""

    max_live: int
    live: int
    """Places held, the warm ones' included."""
    warm: Mapping[str, int]
    """Template name -> sandboxes ready."""
    waiting: Mapping[str, int]
    """Tenant -> calls in the queue."""
    problems: tuple[str, ...]
    """Why templates cannot be warmed at present, and what went wrong lately behind the scenes."""


@dataclass(eq=False)
class _Shelf:
    """The warm sandboxes of one template."""

    template: Template
    resources: Resources
    network: Network
    count: int
    ready: deque[Sandbox] = field(default_factory=deque)
    filling: bool = False
    failures: int = 0
    """In a row."""
    not_before_s: float = 0.0
    problem: str | None = None


class PooledBackend:
    """`SandboxBackend` over another one, which it owns and closes. For one event loop."""

    def __init__(self, inner: SandboxBackend, max_live: int, queue_timeout_s: float = 60.0) -> None:
        """`max_live`: places; `queue_timeout_s`: the longest that a call waits for one."""
        self.inner = inner
        self.queue_timeout_s = queue_timeout_s
        self.places = Places(max_live, self._evict)
        self._shelves: dict[tuple[str, str, Resources, Network], _Shelf] = {}
        self._live: dict[str, PooledSandbox] = {}
        self._evicting = 0
        self._looker: asyncio.Task[None] | None = None
        self._mishaps: deque[str] = deque(maxlen=8)
        self._background = Tasks(on_error=lambda error: self._mishaps.append(str(error)))
        self._closed = False

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities."""
        return self.inner.capabilities()

    def doctor(self) -> list[str]:
        """See SandboxBackend.doctor."""
        return self.inner.doctor()

    def health(self) -> PoolHealth:
        """What the pool is doing now."""
        shelves = self._shelves.values()
        warm: dict[str, int] = {}
        for shelf in shelves:
            warm[shelf.template.name] = warm.get(shelf.template.name, 0) + len(shelf.ready)
        problems = [f"{shelf.template.name}: {shelf.problem}" for shelf in shelves if shelf.problem]
        waiting = self.places.queue.by_tenant()
        return PoolHealth(self.places.total, self.places.held, warm, waiting, (*problems, *self._mishaps))

    async def prewarm(
        self,
        template: Template,
        resources: Resources | None = None,
        network: Network | None = None,
        count: int = 1,
    ) -> None:
        """From now on keeps `count` sandboxes of that kind ready, as far as places are free; 0: none.

        Returns at once. What is handed out is replaced; what fails is tried again later (see `health`).
        """
        self._check_open()
        key = self._key(template, resources, network)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(template, key[2], key[3], count)
        shelf.count = count
        while len(shelf.ready) > count:
            self._background.start(self._end_warm(shelf.ready.pop()))
        self._refill()

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
        if snapshot is None:
            key = self._key(template or Template(), resources, network)
            warm = await self._take_warm(self._shelves.get(key))
            if warm is not None:
                return await self._hand_out(warm, timeout_s, metadata)
        await self.acquire((metadata or {}).get(TENANT, ""))
        try:
            inner = await self.inner.create(template, resources, network, timeout_s, snapshot, metadata)
        except BaseException:
            self._release()
            raise
        return self.adopt(inner, metadata if snapshot is None else None, timeout_s)

    async def connect(self, sandbox_id: str) -> PooledSandbox:
        """See SandboxBackend.connect. Resuming a paused one takes a place."""
        sandbox = self._live.get(sandbox_id)
        if sandbox is not None and (await sandbox.get_info()).state == "killed":
            sandbox.ended(forget=True)
            sandbox = None
        if sandbox is None:
            raise missing_sandbox(sandbox_id)
        await sandbox.resume()
        return sandbox

    async def list(self) -> list[SandboxInfo]:
        """See SandboxBackend.list. Warm ones are not listed."""
        infos = await self.inner.list()
        return [self._live[info.id].described(info) for info in infos if info.id in self._live]

    async def list_snapshots(self) -> list[SnapshotInfo]:
        """See SandboxBackend.list_snapshots."""
        return await self.inner.list_snapshots()

    async def delete_snapshot(self, snapshot: str) -> None:
        """See SandboxBackend.delete_snapshot."""
        await self.inner.delete_snapshot(snapshot)

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        """See SandboxBackend.export_snapshot."""
        await self.inner.export_snapshot(snapshot, target)

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        """See SandboxBackend.import_snapshot."""
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
        try:
            await self.places.acquire(tenant, num, self.queue_timeout_s)
        finally:
            self._refill()

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
        self._release(num)

    def expect_end(self, timeout_s: float | None) -> None:
        """Looks after the places once a time to live is over."""
        if timeout_s is None or self._closed:
            return
        loop = asyncio.get_running_loop()
        loop.call_later(
            timeout_s + EXPIRY_SLACK_S, lambda: self._closed or self._background.start(self._look())
        )

    # Warm ones

    async def _take_warm(self, shelf: _Shelf | None) -> Sandbox | None:
        """The oldest warm sandbox that lives. Those that died meanwhile are cleared away."""
        while shelf is not None and shelf.ready:
            warm = shelf.ready.popleft()
            try:
                alive = (await warm.get_info()).state == "running"
            except SandboxError:
                alive = False
            except BaseException:
                self._background.start(self._end_warm(warm))
                raise
            if alive:
                return warm
            self._background.start(self._end_warm(warm))
        return None

    async def _hand_out(
        self, warm: Sandbox, timeout_s: float | None, metadata: Mapping[str, str] | None
    ) -> PooledSandbox:
        try:
            if timeout_s is not None:
                await warm.set_timeout(timeout_s)
        except BaseException:
            self._background.start(self._end_warm(warm))
            raise
        self._refill()
        return self.adopt(warm, metadata or {}, timeout_s)

    def _refill(self) -> None:
        for shelf in self._shelves.values():
            if not shelf.filling and len(shelf.ready) < shelf.count and not self._closed:
                shelf.filling = True
                self._background.start(self._fill(shelf))

    async def _fill(self, shelf: _Shelf) -> None:
        """Makes what a shelf lacks, one after the other, while places are free."""
        try:
            while len(shelf.ready) < shelf.count:
                await asyncio.sleep(max(0.0, shelf.not_before_s - time.monotonic()))
                if len(shelf.ready) >= shelf.count or not self.places.take():
                    return
                try:
                    warm = await self.inner.create(shelf.template, shelf.resources, shelf.network)
                except BaseException as error:
                    self._release(refill=False)
                    if not isinstance(error, EtudeError):
                        raise
                    shelf.problem = str(error)
                    shelf.failures += 1
                    shelf.not_before_s = time.monotonic() + _RETRY.pause_s(shelf.failures)
                    continue
                shelf.problem, shelf.failures = None, 0
                shelf.ready.append(warm)
                # Somebody may have begun to wait while it was made.
                self.places.serve()
        finally:
            shelf.filling = False

    def _evict(self, num: int) -> None:
        """Ends warm sandboxes, those of the fullest shelf first, for whoever lacks `num` places."""
        while self._evicting < num:
            shelf = max(self._shelves.values(), key=lambda shelf: len(shelf.ready), default=None)
            if shelf is None or not shelf.ready:
                return
            self._evicting += 1
            self._background.start(self._end_evicted(shelf.ready.popleft()))

    async def _end_evicted(self, warm: Sandbox) -> None:
        try:
            await warm.kill()
        finally:
            self._evicting -= 1
            self._release()

    async def _end_warm(self, warm: Sandbox) -> None:
        try:
            await warm.kill()
        finally:
            self._release()

    # Places

    def _release(self, num: int = 1, refill: bool = True) -> None:
        self.places.release(num)
        if refill:
            self._refill()

    async def _look_while_waiting(self) -> None:
        while len(self.places.queue) and not self._closed:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        """Takes back the places of sandboxes that ended by themselves."""
        before = [(sandbox, sandbox.num_turns) for sandbox in self._live.values() if not sandbox.is_turning]
        states = {info.id: info.state for info in await self.inner.list()}
        for sandbox, num_turns in before:
            state = states.get(sandbox.id, "killed")
            if state != "running" and sandbox.num_turns == num_turns:
                sandbox.ended(forget=state == "killed")

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def _key(
        self, template: Template, resources: Resources | None, network: Network | None
    ) -> tuple[str, str, Resources, Network]:
        return template.digest, template.name, resources or Resources(), network or NO_NETWORK


def _closed_error() -> SandboxError:
    return SandboxError("the pool is closed", field="sandbox.backend", fix="open another one")
