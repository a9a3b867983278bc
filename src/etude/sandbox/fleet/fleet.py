"""Many hosts as one backend.

    create -> queue -> Scheduler.place -> that host's backend -> confirm
                 ^                              | fails: another host, at most `attempts`
    heartbeats --+-- a report, an end, a new host: the queue is served again
        | `missed_heartbeats` in a row
        v
    the host is dead: its sandboxes raise SandboxLostError at once, calls in flight included

A host that answers again after its death comes back empty: whatever still runs there is killed first,
because its sandboxes were reported as lost and may run elsewhere by now.
Sandbox ids are `host:id`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from etude.errors import ConfigError, InfrastructureError, ResourceError, SandboxError
from etude.kit.tasks import finish_all
from etude.sandbox.fleet.heartbeat import Heartbeats
from etude.sandbox.fleet.host import FleetHost, HostSpec, kill
from etude.sandbox.fleet.hosts import Placement, Request
from etude.sandbox.fleet.registry import FleetConfig, FleetSandbox, Registry
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Capabilities, Network, Resources, SandboxInfo, SnapshotInfo

Info = TypeVar("Info", SandboxInfo, SnapshotInfo)
_Isolation = Literal["none", "namespaces", "container", "gvisor", "vm"]
_ISOLATION: tuple[_Isolation, ...] = ("none", "namespaces", "container", "gvisor", "vm")
"""Weakest first."""


class Fleet(SandboxBackend):
    """`SandboxBackend` over named hosts. For one event loop; heartbeats begin with the first call."""

    def __init__(
        self,
        hosts: Mapping[str, SandboxBackend | HostSpec],
        config: FleetConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not hosts:
            raise ConfigError("a fleet without hosts", field="hosts", fix="name at least one host")
        self.config = config or FleetConfig()
        self.registry = Registry(self.config, clock)
        self._heartbeats = Heartbeats(self.registry)
        self._closed = False
        for name, host in hosts.items():
            self.registry.add(name, host)

    # SandboxBackend

    def capabilities(self) -> Capabilities:
        """What every host can do."""
        return common_capabilities([host.backend.capabilities() for host in self.registry.hosts.values()])

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """As SandboxBackend.create, on the host that the scheduler chooses.

        A failure of the host is tried again on another; what the caller or the agent did wrong is not.
        A snapshot is restored on the host that holds it. Raises CapacityError if none has room in time.
        """
        await self.start()
        holder, inner_id = (None, None) if snapshot is None else self.registry.locate_snapshot(snapshot)
        # Resources are the snapshot's where there is one.
        request = Request(resources or Resources(), only=None if holder is None else holder.name)
        while True:
            placement = await self.registry.place(request)
            host = self.registry.placed(placement)
            making = host.backend.create(template, resources, network, timeout_s, inner_id, metadata)
            try:
                return await self._make_on(host, placement, making)
            except (InfrastructureError, ResourceError, TimeoutError, OSError) as error:
                self.registry.suspect(host, error)
                request = dataclasses.replace(request, exclude=request.exclude | {host.name})
                if holder or len(request.exclude) >= self.config.attempts or not self._others(request):
                    if isinstance(error, (InfrastructureError, ResourceError)):
                        raise
                    raise SandboxError(
                        f"no host could start a sandbox: {error}", field="fleet", received=host.name
                    ) from error

    async def connect(self, sandbox_id: str) -> Sandbox:
        """As SandboxBackend.connect. Raises SandboxLostError if its host is dead."""
        await self.start()
        known = self.registry.sandboxes.get(sandbox_id)
        if known is not None:
            known.inner = await known.attempt(lambda s: known.host.backend.connect(s.id))
            return known
        host, inner_id = self.registry.locate_sandbox(sandbox_id)
        inner = await host.call(host.backend.connect(inner_id))
        info = await host.call(inner.get_info())
        self.registry.scheduler.adopt(host.name, sandbox_id, info.resources, self.registry.clock())
        return self.registry.wrap(host, inner)

    async def list(self) -> list[SandboxInfo]:
        """The sandboxes of all living hosts, oldest first."""
        rows = await self._of_all(lambda backend: backend.list())
        infos = [dataclasses.replace(info, id=host.id_of(info.id)) for host, info in rows]
        return sorted(infos, key=lambda info: info.created_s)

    async def list_snapshots(self) -> list[SnapshotInfo]:
        """The snapshots of all living hosts, oldest first."""
        rows = await self._of_all(lambda backend: backend.list_snapshots())
        return sorted((_snapshot_of(host, info) for host, info in rows), key=lambda info: info.created_s)

    async def delete_snapshot(self, snapshot: str) -> None:
        """As SandboxBackend.delete_snapshot."""
        await self.start()
        host, inner_id = self.registry.locate_snapshot(snapshot)
        await host.call(host.backend.delete_snapshot(inner_id))

    async def export_snapshot(self, snapshot: str, target: Path) -> None:
        """As SandboxBackend.export_snapshot."""
        await self.start()
        host, inner_id = self.registry.locate_snapshot(snapshot)
        await host.call(host.backend.export_snapshot(inner_id, target))

    async def import_snapshot(self, source: Path) -> SnapshotInfo:
        """As SandboxBackend.import_snapshot, on the host to which a sandbox would go now."""
        await self.start()
        placement = await self.registry.place(Request(Resources()))
        self.registry.scheduler.cancel(placement.ticket)
        host = self.registry.placed(placement)
        info = await host.call(host.backend.import_snapshot(source))
        return _snapshot_of(host, info)

    async def close(self) -> None:
        """Stops the heartbeats and closes every living host's backend. Idempotent."""
        self._closed = True
        await self._heartbeats.stop()
        living = [host for host in self.registry.hosts.values() if not host.is_dead]
        try:
            await finish_all(host.call(host.backend.close()) for host in living)
        finally:
            for host in self.registry.hosts.values():
                host.die("the fleet was closed")
                await host.settle()

    def doctor(self) -> list[str]:
        """Every host's obstacles, by name."""
        return [
            f"{host.name}: {problem}"
            for host in self.registry.hosts.values()
            for problem in host.backend.doctor()
        ]

    # Hosts

    async def start(self) -> None:
        """Looks at every host once, counts what runs there already, and begins the heartbeats. Idempotent.

        Raises SandboxError once the fleet is closed.
        """
        if self._closed:
            raise SandboxError("the fleet is closed", field="sandbox.backend", received="fleet")
        await self._heartbeats.start()

    async def add_host(self, name: str, host: SandboxBackend | HostSpec) -> None:
        """One more host. Raises ConfigError if there is one of that name."""
        added = self.registry.add(name, host)
        if self._heartbeats.started:
            await self._heartbeats.watch(added)
        self.registry.queue.serve()

    def retire(self, name: str) -> None:
        """Makes nothing new on a host: what runs there goes on to its end, unmoved, and may be copied there.
        `reopen` opens the host again. Raises ConfigError for an unknown one."""
        self.registry.scheduler.retire(self.registry.host(name).name)

    async def remove_host(self, name: str) -> bool:
        """Forgets a host, its backend closed, once nothing of this fleet runs there or it is dead; until then
        False. Raises ConfigError for an unknown one."""
        if not self.registry.is_empty(name):
            return False
        self.retire(name)
        await self._heartbeats.unwatch(name)
        if not self.registry.is_empty(name):  # a sandbox was found, or woke, meanwhile
            await self._heartbeats.watch(self.registry.host(name))
            return False
        host = self.registry.remove(name)
        if not host.is_dead:
            await host.call(host.backend.close())
        host.die("it left the fleet")
        await host.settle()
        return True

    def mark_dead(self, name: str, reason: str) -> list[str]:
        """For who knows before the heartbeats that a host is gone: ids of the sandboxes lost with it."""
        return self.registry.mark_dead(name, reason)

    def reopen(self, name: str) -> None:
        """A retired host takes sandboxes again. Raises ConfigError for an unknown one."""
        self.registry.scheduler.reopen(self.registry.host(name).name)
        self.registry.queue.serve()

    async def _of_all(
        self, ask: Callable[[SandboxBackend], Coroutine[Any, Any, list[Info]]]
    ) -> list[tuple[FleetHost, Info]]:
        """What the backends of all living hosts answer."""
        await self.start()
        living = [host for host in self.registry.hosts.values() if not host.is_dead]
        rows = await asyncio.gather(*(host.call(ask(host.backend)) for host in living))
        return [(host, info) for host, infos in zip(living, rows, strict=True) for info in infos]

    async def _make_on(
        self, host: FleetHost, placement: Placement, making: Coroutine[Any, Any, Sandbox]
    ) -> FleetSandbox:
        """One attempt on one host; the reservation is confirmed or given back."""
        try:
            inner = await host.call(making, kill, self.config.create_timeout_s)
        except BaseException:
            self.registry.scheduler.cancel(placement.ticket)
            self.registry.queue.serve()
            raise
        if host.is_dead:
            raise host.lost(inner.id)
        self.registry.scheduler.confirm(placement.ticket, host.id_of(inner.id), self.registry.clock())
        return self.registry.wrap(host, inner)

    def _others(self, request: Request) -> bool:
        """Whether a living host is left that has not failed the request."""
        return any(
            host.is_open and name not in request.exclude
            for name, host in self.registry.scheduler.hosts.items()
        )


def _snapshot_of(host: FleetHost, info: SnapshotInfo) -> SnapshotInfo:
    return dataclasses.replace(info, id=host.id_of(info.id), sandbox_id=host.id_of(info.sandbox_id))


def common_capabilities(hosts: Sequence[Capabilities]) -> Capabilities:
    """The weakest isolation, and only what every host offers."""
    forks = {host.fork for host in hosts}
    moves = {host.migrate for host in hosts}
    weakest = _ISOLATION[min(_ISOLATION.index(host.isolation) for host in hosts)]
    return Capabilities(
        backend="fleet",
        isolation=weakest,
        commands=all(host.commands for host in hosts),
        network=all(host.network for host in hosts),
        images=all(host.images for host in hosts),
        snapshots=frozenset.intersection(*(host.snapshots for host in hosts)),
        pause=frozenset.intersection(*(host.pause for host in hosts)),
        fork=None if None in forks else "full" if forks == {"full"} else "filesystem",
        migrate=None if None in moves else "full" if moves == {"full"} else "filesystem",
        neighbours_share=any(host.neighbours_share for host in hosts),
    )
