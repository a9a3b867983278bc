"""The fleet's registry of hosts, reservations and sandbox handles.

Calls of a handle, those in flight included, raise SandboxLostError as soon as its host is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from etude.errors import ConfigError, InfrastructureError, SandboxError
from etude.sandbox.errors import CapacityError, SandboxLostError, SandboxMissingError, SnapshotMissingError
from etude.sandbox.fleet.host import FleetHost, HostSpec, Undo, kill
from etude.sandbox.fleet.hosts import Placement, Policy, Request
from etude.sandbox.fleet.scheduler import Scheduler
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.migration import gather_copies
from etude.sandbox.refusals import check_count
from etude.sandbox.types import SandboxInfo, SnapshotInfo, SnapshotKind
from etude.sandbox.waiting import WaitingLine
from etude.sandbox.wrapping import Operation, WrappedSandbox


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Deadlines and limits of a fleet, in seconds where not said otherwise."""

    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 1.0
    missed_heartbeats: int = 3
    """Number in a row after which a host is dead."""
    create_timeout_s: float = 60.0
    """Of one attempt to create a sandbox on one host."""
    attempts: int = 3
    """Number of hosts tried for one sandbox."""
    queue_wait_s: float = 30.0
    """How long a request waits for a free place."""
    max_queued: int = 10_000
    """Most requests that wait at once; further ones are refused."""
    policy: Policy = field(default_factory=Policy)
    seed: int = 0


class Registry:
    """Hosts, reservations and handles of one fleet. For one event loop."""

    def __init__(self, config: FleetConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.scheduler = Scheduler(policy=config.policy, seed=config.seed)
        self.queue = WaitingLine[Request, Placement](
            lambda request: self.scheduler.place(request, clock()),
            lambda placement: self.scheduler.cancel(placement.ticket),
        )
        """One tenant, so first come, first served: many small requests do not starve a large one."""
        self.hosts: dict[str, FleetHost] = {}
        self.sandboxes: dict[str, FleetSandbox] = {}
        """The handles that were given out, by fleet-wide id."""

    def add(self, name: str, host: SandboxBackend | HostSpec) -> FleetHost:
        """Adds a host. Raises ConfigError for a name that is taken or invalid."""
        if not name or ":" in name:
            raise ConfigError(
                "must not be empty or contain a colon", field="hosts", received=name, fix="rename it"
            )
        added = FleetHost(name, host if isinstance(host, HostSpec) else HostSpec(host))
        self.scheduler.add_host(name, added.capacity)
        self.hosts[name] = added
        return added

    def is_empty(self, name: str) -> bool:
        """Whether this fleet knows of no running, paused or starting sandbox on a host; a dead host is empty.
        Raises ConfigError for an unknown one."""
        return self.host(name).is_dead or not self.scheduler.hosts[name].reservations

    def remove(self, name: str) -> FleetHost:
        """Removes an empty host."""
        self.scheduler.remove_host(name)
        return self.hosts.pop(name)

    def mark_dead(self, name: str, reason: str) -> list[str]:
        """Marks a host dead and ends its handles; returns the ids of the sandboxes lost with it."""
        lost = self.scheduler.mark_dead(name)
        host = self.host(name)
        host.mark_dead(reason)
        for sandbox_id in lost:
            sandbox = self.sandboxes.pop(sandbox_id, None)
            if sandbox is not None:
                sandbox.mark_ended(host.lost_error(sandbox_id))
        return lost

    def suspect(self, host: FleetHost, error: BaseException) -> None:
        """Marks a host suspected that did not answer or failed a start: until it has had time for another
        heartbeat it is chosen only if no other has room. A host that fails fast would look empty. It is not
        excluded: where all hosts are slow, all are suspected."""
        host.last_error = f"{type(error).__name__}: {error}"
        if self.hosts.get(host.name) is host:  # else it was removed
            until_s = self.clock() + self.config.heartbeat_s + self.config.heartbeat_timeout_s
            self.scheduler.hosts[host.name].suspected_until_s = until_s

    async def place(self, request: Request) -> Placement:
        """Reserves a place. Raises CapacityError after `queue_wait_s`, or at once if the queue is full."""
        if request.only is not None:
            placement = self.scheduler.place(request, self.clock())
            if placement is not None:
                return placement
        if len(self.queue) >= self.config.max_queued:
            raise self._full(f"{self.config.max_queued} requests wait already")
        try:
            return await self.queue.wait(request, self.config.queue_wait_s)
        except TimeoutError as error:
            raise self._full(f"waited {self.config.queue_wait_s} s") from error

    def _full(self, why: str) -> CapacityError:
        return CapacityError(
            f"no host has room for another sandbox: {why}",
            field="fleet",
            received=f"{len(self.queue)} waiting",
            fix="add hosts, end sandboxes, or allow a longer wait",
        )

    def host_of(self, placement: Placement) -> FleetHost:
        """The host of a placement. Raises SandboxLostError if the host has been removed since."""
        host = self.hosts.get(placement.host)
        if host is None:
            raise SandboxLostError("its host has left the fleet", field="sandbox", received=placement.host)
        return host

    def release(self, sandbox: FleetSandbox) -> None:
        """Releases the reservation of an ended sandbox and serves the queue."""
        self.sandboxes.pop(sandbox.id, None)
        self.scheduler.release(sandbox.id)
        self.queue.serve()

    def wrap(self, host: FleetHost, inner: Sandbox) -> FleetSandbox:
        """Creates the handle of a sandbox whose reservation is confirmed."""
        sandbox = self.sandboxes[host.id_of(inner.id)] = FleetSandbox(self, host, inner)
        return sandbox

    def host(self, name: str) -> FleetHost:
        """A host by name, dead or alive. Raises ConfigError for an unknown one."""
        host = self.hosts.get(name)
        if host is None:
            raise ConfigError("no such host", field="host", received=name, fix=f"one of {list(self.hosts)}")
        return host

    def locate_sandbox(self, sandbox_id: str) -> tuple[FleetHost, str]:
        """(host, id on that host) of a sandbox. Raises SandboxMissingError, SandboxLostError."""
        host, inner_id = self._split(sandbox_id, "sandbox", SandboxMissingError)
        if host.is_dead:
            raise host.lost_error(sandbox_id)
        return host, inner_id

    def locate_snapshot(self, snapshot: str) -> tuple[FleetHost, str]:
        """(host, id on that host) of a snapshot. Raises SnapshotMissingError, SandboxLostError."""
        host, inner_id = self._split(snapshot, "snapshot", SnapshotMissingError)
        if host.is_dead:
            raise SandboxLostError(
                "the host that holds the snapshot is dead", field="snapshot", received=snapshot
            )
        return host, inner_id

    def _split(self, whole_id: str, what: str, missing: type[SandboxError]) -> tuple[FleetHost, str]:
        name, _, inner_id = whole_id.partition(":")
        host = self.hosts.get(name)
        if host is None or not inner_id:
            raise missing(f"no such {what}", field=what, received=whole_id)
        return host, inner_id


Result = TypeVar("Result")


class FleetSandbox(WrappedSandbox):
    """`Sandbox` on a host of a fleet."""

    def __init__(self, registry: Registry, host: FleetHost, inner: Sandbox) -> None:
        super().__init__(host.id_of(inner.id))
        self.host = host
        self.inner = inner
        self._registry = registry
        self._end_error: SandboxError | None = None

    async def perform(self, name: str, operation: Operation[Result]) -> Result:
        return await self.attempt(operation)

    async def attempt(self, operation: Operation[Result], undo: Undo | None = None) -> Result:
        """Runs one operation on the host's sandbox. Raises SandboxLostError once the host is dead."""
        if self._end_error is not None:
            raise self._end_error
        try:
            return await self.host.call(operation(self.inner), undo)
        except (SandboxLostError, SandboxMissingError) as error:
            if isinstance(error, SandboxLostError):
                self._registry.suspect(self.host, error)
            self.mark_ended(error)
            self._registry.release(self)
            raise

    def mark_ended(self, reason: SandboxError) -> None:
        """Makes every later call raise `reason`."""
        self._end_error = self._end_error or reason

    async def get_info(self) -> SandboxInfo:
        return replace(await super().get_info(), id=self.id)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """See Sandbox.create_snapshot. The snapshot is stored on the sandbox's host, and restored there."""
        info = await super().create_snapshot(kind, name)
        return replace(info, id=self.host.id_of(info.id), sandbox_id=self.id)

    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        """See Sandbox.fork. Copies stay on the same host while there is room; others are migrated."""
        check_count(count)
        try:
            return await self._fork(count)
        finally:
            self._registry.queue.serve()

    async def migrate(self, target: SandboxBackend) -> Sandbox:
        """See Sandbox.migrate. Moves the sandbox out of the fleet, to the backend `target`."""
        moved = await self.attempt(lambda s: s.migrate(target), kill)
        self.mark_ended(SandboxMissingError("the sandbox left the fleet", field="sandbox", received=self.id))
        self._registry.release(self)
        return moved

    async def kill(self) -> None:
        """See Sandbox.kill. Does nothing if the host is dead."""
        if self._end_error is not None:
            return
        try:
            await super().kill()
        except (SandboxLostError, SandboxMissingError):
            return
        self.mark_ended(SandboxMissingError("the sandbox was killed", field="sandbox", received=self.id))
        self._registry.release(self)

    async def _fork(self, count: int) -> list[Sandbox | SandboxError]:
        """`count` results: a sandbox, or the error that prevented it. Unused reservations are cancelled."""
        scheduler = self._registry.scheduler
        places = scheduler.place_fork(self.id, count, self._registry.clock())
        can_move = self.host.backend.capabilities().migrate is not None
        for number, place in enumerate(places):
            if place is not None and place.host != self.host.name and not can_move:
                scheduler.cancel(place.ticket)
                places[number] = None
        used = [place for place in places if place is not None]
        try:
            copies = await self.attempt(lambda s: s.fork(len(used)), _kill_all) if used else []
        except BaseException:
            for place in used:
                scheduler.cancel(place.ticket)
            raise
        placing = [self._place_copy(place, copy) for place, copy in zip(used, copies, strict=True)]
        placed = iter(await gather_copies(placing))
        return [_no_room(self.id) if place is None else next(placed) for place in places]

    async def _place_copy(self, place: Placement, copy: Sandbox | SandboxError) -> Sandbox:
        """Moves a copy to the host of its reservation, and confirms it. Raises SandboxError."""
        registry, host = self._registry, self.host
        if isinstance(copy, SandboxError):
            registry.scheduler.cancel(place.ticket)
            raise copy
        try:
            if place.host != host.name:
                copy = await self._migrate_copy(copy, place)
            host = registry.host_of(place)
            registry.scheduler.confirm(place.ticket, host.id_of(copy.id), registry.clock())
        except SandboxMissingError as error:
            # The target host died in between, which cancelled its reservations.
            raise host.lost_error() from error
        except BaseException as error:
            registry.scheduler.cancel(place.ticket)
            if isinstance(error, InfrastructureError) and not isinstance(error, SandboxError):
                raise SandboxError(str(error), field="sandbox", received=self.id) from error
            raise
        return registry.wrap(host, copy)

    async def _migrate_copy(self, copy: Sandbox, place: Placement) -> Sandbox:
        try:
            target = self._registry.host_of(place)
            return await self.host.call(copy.migrate(target.backend), kill)
        except BaseException:
            if not self.host.is_dead:
                await asyncio.shield(copy.kill())
            raise


def _no_room(sandbox_id: str) -> CapacityError:
    return CapacityError(
        "no host with room for another copy can be moved to",
        field="sandbox",
        received=sandbox_id,
        fix="ask for fewer copies, or add hosts",
    )


async def _kill_all(copies: list[Sandbox | SandboxError]) -> None:
    for copy in copies:
        if not isinstance(copy, SandboxError):
            await copy.kill()
