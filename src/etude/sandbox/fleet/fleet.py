"""Many hosts as one backend.

    create -> queue -> Scheduler.place -> that host's backend -> confirm
                 ^                              | fails: another host, at most `attempts`
    heartbeats --+-- a report, an ended sandbox, a new host: the queue is served again
        | `missed_heartbeats` in a row
        v
    the host is dead: its sandboxes raise SandboxLostError at once, calls in flight included

A dead host that answers again rejoins empty: whatever still runs there is killed first, because its sandboxes
were reported as lost and may run on other hosts by now.
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
    """`SandboxBackend` over named hosts. For one event loop; heartbeats start with the first call."""

    def __init__(
        self,
        hosts: Mapping[str, SandboxBackend | HostSpec],
        config: FleetConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not hosts:
            raise ConfigError("a fleet needs hosts", field="hosts", fix="name at least one host")
        self.config = config or FleetConfig()
        self.registry = Registry(self.config, clock)
        self._heartbeats = Heartbeats(self.registry)
        self._closed = False
        for name, host in hosts.items():
            self.registry.add(name, host)

    # SandboxBackend

    def capabilities(self) -> Capabilities:
        """The capabilities that every host has."""
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

        A failure of the host is retried on another one; an error of the caller or the agent is not.
        A snapshot is restored on the host that holds it. Raises CapacityError if none has room in time.
        """
        await self.start()
        holder, inner_id = (None, None) if snapshot is None else self.registry.locate_snapshot(snapshot)
        # Resources are the snapshot's where there is one.
        request = Request(resources or Resources(), only=None if holder is None else holder.name)
        while True:
            placement = await self.registry.place(request)
            host = self.registry.host_of(placement)
            creation = host.backend.create(template, resources, network, timeout_s, inner_id, metadata)
            try:
                return await self._create_on(host, placement, creation)
            except (InfrastructureError, ResourceError, TimeoutError, OSError) as error:
                self.registry.suspect(host, error)
                request = dataclasses.replace(request, exclude=request.exclude | {host.name})
                if holder or len(request.exclude) >= self.config.attempts or not self._can_retry(request):
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
        rows = await self._query_all(lambda backend: backend.list())
        infos = [dataclasses.replace(info, id=host.id_of(info.id)) for host, info in rows]
        return sorted(infos, key=lambda info: info.created_s)

    async def list_snapshots(self) -> list[SnapshotInfo]:
        """The snapshots of all living hosts, oldest first."""
        rows = await self._query_all(lambda backend: backend.list_snapshots())
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
        """As SandboxBackend.import_snapshot, on the host that the scheduler chooses."""
        await self.start()
        placement = await self.registry.place(Request(Resources()))
        self.registry.scheduler.cancel(placement.ticket)
        host = self.registry.host_of(placement)
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
                host.mark_dead("the fleet was closed")
                await host.wait_for_abandoned()

    def doctor(self) -> list[str]:
        """The problems of every host, prefixed with its name."""
        return [
            f"{host.name}: {problem}"
            for host in self.registry.hosts.values()
            for problem in host.backend.doctor()
        ]

    # Hosts

    async def start(self) -> None:
        """Queries every host once, adopts the sandboxes there, and starts the heartbeats. Idempotent.

        Raises SandboxError once the fleet is closed.
        """
        if self._closed:
            raise SandboxError("the fleet is closed", field="sandbox.backend", received="fleet")
        await self._heartbeats.start()

    async def add_host(self, name: str, host: SandboxBackend | HostSpec) -> None:
        """Adds a host. Raises ConfigError if the name is taken."""
        added = self.registry.add(name, host)
        if self._heartbeats.started:
            await self._heartbeats.watch(added)
        self.registry.queue.serve()

    def retire(self, name: str) -> None:
        """Places no new sandboxes on a host: those there stay until they end, and may be forked there.
        `reopen` undoes it. Raises ConfigError for an unknown host."""
        self.registry.scheduler.retire(self.registry.host(name).name)

    async def remove_host(self, name: str) -> bool:
        """Removes a host and closes its backend, if nothing of this fleet runs there or it is dead; else
        returns False. Raises ConfigError for an unknown host."""
        if not self.registry.is_empty(name):
            return False
        self.retire(name)
        await self._heartbeats.unwatch(name)
        if not self.registry.is_empty(name):  # a sandbox was found, or resumed, meanwhile
            await self._heartbeats.watch(self.registry.host(name))
            return False
        host = self.registry.remove(name)
        if not host.is_dead:
            await host.call(host.backend.close())
        host.mark_dead("it left the fleet")
        await host.wait_for_abandoned()
        return True

    def mark_dead(self, name: str, reason: str) -> list[str]:
        """Marks a host dead before the heartbeats notice; returns the ids of the sandboxes lost with it."""
        return self.registry.mark_dead(name, reason)

    def reopen(self, name: str) -> None:
        """Accepts sandboxes on a retired host again. Raises ConfigError for an unknown host."""
        self.registry.scheduler.reopen(self.registry.host(name).name)
        self.registry.queue.serve()

    async def _query_all(
        self, query: Callable[[SandboxBackend], Coroutine[Any, Any, list[Info]]]
    ) -> list[tuple[FleetHost, Info]]:
        """The rows that `query` returns for the backend of each living host."""
        await self.start()
        living = [host for host in self.registry.hosts.values() if not host.is_dead]
        rows = await asyncio.gather(*(host.call(query(host.backend)) for host in living))
        return [(host, info) for host, infos in zip(living, rows, strict=True) for info in infos]

    async def _create_on(
        self, host: FleetHost, placement: Placement, creation: Coroutine[Any, Any, Sandbox]
    ) -> FleetSandbox:
        """One attempt on one host; the reservation is confirmed or cancelled."""
        try:
            inner = await host.call(creation, kill, self.config.create_timeout_s)
        except BaseException:
            self.registry.scheduler.cancel(placement.ticket)
            self.registry.queue.serve()
            raise
        if host.is_dead:
            raise host.lost_error(inner.id)
        self.registry.scheduler.confirm(placement.ticket, host.id_of(inner.id), self.registry.clock())
        return self.registry.wrap(host, inner)

    def _can_retry(self, request: Request) -> bool:
        """Whether there is an open host that has not failed the request."""
        return any(
            host.is_open and name not in request.exclude
            for name, host in self.registry.scheduler.hosts.items()
        )


def _snapshot_of(host: FleetHost, info: SnapshotInfo) -> SnapshotInfo:
    return dataclasses.replace(info, id=host.id_of(info.id), sandbox_id=host.id_of(info.sandbox_id))


def common_capabilities(hosts: Sequence[Capabilities]) -> Capabilities:
    """The weakest isolation among the hosts, and only the features that all of them have."""
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
