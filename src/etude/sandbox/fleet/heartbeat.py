"""Heartbeats: they detect host failure, measure load, and list the sandboxes that run on each host.

beat -> answered: report the pressure, release the reservations of ended sandboxes, serve the queue
     -> missed:   after `missed_heartbeats` in a row the host is dead
     -> answered by a dead host: kill what it still runs, then it rejoins, empty
"""

from __future__ import annotations

import asyncio
import contextlib

from etude.errors import InfrastructureError
from etude.kit.tasks import end_tasks
from etude.sandbox.errors import SandboxMissingError
from etude.sandbox.fleet.host import FleetHost
from etude.sandbox.fleet.hosts import Pressure
from etude.sandbox.fleet.registry import Registry
from etude.sandbox.types import SandboxInfo


class Heartbeats:
    """The heartbeats of all hosts: one task for each."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._config = registry.config
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._starting = asyncio.Lock()
        self.started = False
        """Whether the heartbeat tasks run."""

    async def start(self) -> None:
        """Queries every host once, adopts the sandboxes that run there, then starts the tasks. Idempotent."""
        async with self._starting:
            if not self.started:
                await asyncio.gather(*(self.watch(host) for host in self._registry.hosts.values()))
                self.started = True

    async def watch(self, host: FleetHost) -> None:
        """Sends one heartbeat to a host, then starts its task."""
        await self.beat(host, adopt=True)
        self._watchers[host.name] = asyncio.create_task(self._watch(host))

    async def unwatch(self, name: str) -> None:
        """Ends the task of a host. Does nothing for a host without one."""
        watcher = self._watchers.pop(name, None)
        if watcher is not None:
            await end_tasks(watcher)

    async def stop(self) -> None:
        """Ends all tasks. Idempotent."""
        watchers, self._watchers = self._watchers, {}
        await end_tasks(*watchers.values())

    async def beat(self, host: FleetHost, adopt: bool = False) -> None:
        """One heartbeat. A miss is counted, not raised. `adopt`: reserves for sandboxes found there, too."""
        began_s = self._registry.clock()
        try:
            pressure, rows = await self._query_host(host)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            host.missed += 1
            self._registry.suspect(host, error)
            if host.missed >= self._config.missed_heartbeats and not host.is_dead:
                self._registry.mark_dead(
                    host.name, f"missed {host.missed} heartbeats; the last: {host.last_error}"
                )
            return
        host.missed = 0
        if host.is_dead:
            if not await self._fence(host, rows):
                return
            host.revive()
            self._registry.scheduler.add_host(host.name, host.capacity)
            rows = []
        if pressure is not None:
            self._registry.scheduler.report(host.name, pressure, began_s)
        if adopt:
            for info in rows:
                self._registry.scheduler.adopt(host.name, host.id_of(info.id), info.resources, began_s)
        self._reconcile(host, {host.id_of(info.id) for info in rows}, began_s)
        self._registry.queue.serve()

    async def _watch(self, host: FleetHost) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            await self.beat(host)

    async def _query_host(self, host: FleetHost) -> tuple[Pressure | None, list[SandboxInfo]]:
        """Pressure and sandboxes of a host, dead or not, within the deadline of a heartbeat."""

        async def query() -> tuple[Pressure | None, list[SandboxInfo]]:
            if host.fetch_capacity is not None:
                host.capacity, host.fetch_capacity = await host.fetch_capacity(), None
                self._registry.scheduler.hosts[host.name].resize(host.capacity)
            pressure, rows = await asyncio.gather(host.probe.pressure(), host.backend.list())
            return pressure, [info for info in rows if host.owns(info)]

        task = asyncio.ensure_future(query())
        try:
            done, _ = await asyncio.wait((task,), timeout=self._config.heartbeat_timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise TimeoutError("no answer in time")
        return task.result()

    def _reconcile(self, host: FleetHost, found: set[str], began_s: float) -> None:
        """Releases the reservations of sandboxes that ended by themselves: their time to live was over."""
        for reservation in list(self._registry.scheduler.hosts[host.name].reservations.values()):
            sandbox_id = reservation.sandbox
            if sandbox_id is None or reservation.confirmed_s > began_s or sandbox_id in found:
                continue
            sandbox = self._registry.sandboxes.pop(sandbox_id, None)
            if sandbox is not None:
                sandbox.mark_ended(
                    SandboxMissingError("the sandbox has ended", field="sandbox", received=sandbox_id)
                )
            self._registry.scheduler.release(sandbox_id)

    async def _fence(self, host: FleetHost, rows: list[SandboxInfo]) -> bool:
        """Kills what a dead host still runs (fencing); False if that failed, and the host stays dead."""
        try:
            async with asyncio.timeout(self._config.create_timeout_s):
                for info in rows:
                    with contextlib.suppress(SandboxMissingError):
                        await (await host.backend.connect(info.id)).kill()
        except (InfrastructureError, OSError, TimeoutError) as error:
            host.last_error = f"still holds lost sandboxes: {error}"
            return False
        return True
