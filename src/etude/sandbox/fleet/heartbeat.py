"""Heartbeats: how the fleet knows that a host lives, how loaded it is and what runs there.

beat -> answered: report the pressure, free the places of what has ended, serve the queue
     -> missed:   `missed_heartbeats` in a row, and the host is dead
     -> answered by a dead host: kill what it still runs, then it is back, empty
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
    """One task for each host."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._config = registry.config
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._starting = asyncio.Lock()
        self.started = False
        """Whether the hosts are being watched."""

    async def start(self) -> None:
        """Looks at every host once, counts what runs there already, then watches. Idempotent."""
        async with self._starting:
            if not self.started:
                await asyncio.gather(*(self.watch(host) for host in self._registry.hosts.values()))
                self.started = True

    async def watch(self, host: FleetHost) -> None:
        """Looks at a host once, and from then on regularly."""
        await self.beat(host, adopt=True)
        self._watchers[host.name] = asyncio.create_task(self._watch(host))

    async def unwatch(self, name: str) -> None:
        """Looks at a host no more. Does nothing for one that is not watched."""
        watcher = self._watchers.pop(name, None)
        if watcher is not None:
            await end_tasks(watcher)

    async def stop(self) -> None:
        """Ends the watching. Idempotent."""
        watchers, self._watchers = self._watchers, {}
        await end_tasks(*watchers.values())

    async def beat(self, host: FleetHost, adopt: bool = False) -> None:
        """One heartbeat: pressure, and what runs there. A miss is counted, not raised."""
        began_s = self._registry.clock()
        try:
            pressure, rows = await self._look(host)
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

    async def _look(self, host: FleetHost) -> tuple[Pressure | None, list[SandboxInfo]]:
        """Asks the host, dead or not, within the deadline of a heartbeat."""

        async def ask() -> tuple[Pressure | None, list[SandboxInfo]]:
            if host.ask_capacity is not None:
                host.capacity, host.ask_capacity = await host.ask_capacity(), None
                self._registry.scheduler.hosts[host.name].resize(host.capacity)
            pressure, rows = await asyncio.gather(host.probe.pressure(), host.backend.list())
            return pressure, [info for info in rows if host.owns(info)]

        task = asyncio.ensure_future(ask())
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
        """Frees the places of sandboxes that have ended by themselves: their time to live was over."""
        for reservation in list(self._registry.scheduler.hosts[host.name].reservations.values()):
            sandbox_id = reservation.sandbox
            if sandbox_id is None or reservation.confirmed_s > began_s or sandbox_id in found:
                continue
            sandbox = self._registry.sandboxes.pop(sandbox_id, None)
            if sandbox is not None:
                sandbox.end(
                    SandboxMissingError("the sandbox has ended", field="sandbox", received=sandbox_id)
                )
            self._registry.scheduler.release(sandbox_id)

    async def _fence(self, host: FleetHost, rows: list[SandboxInfo]) -> bool:
        """Kills what a host that was dead still runs; False if that failed, and it stays dead."""
        try:
            async with asyncio.timeout(self._config.create_timeout_s):
                for info in rows:
                    with contextlib.suppress(SandboxMissingError):
                        await (await host.backend.connect(info.id)).kill()
        except (InfrastructureError, OSError, TimeoutError) as error:
            host.last_error = f"still holds lost sandboxes: {error}"
            return False
        return True
