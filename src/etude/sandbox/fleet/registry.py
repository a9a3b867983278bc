"""The fleet's books: which hosts there are, which sandbox lives where, who holds a handle of it; and the
handles. Calls of one end with SandboxLostError as soon as its host is known to be dead, those in flight
included.
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
    """In a row, until a host counts as dead."""
    create_timeout_s: float = 60.0
    """Of one attempt on one host."""
    attempts: int = 3
    """Hosts that are tried for one sandbox."""
    queue_wait_s: float = 30.0
    """How long a request waits for room."""
    max_queued: int = 10_000
    """Requests that wait at once; one more is refused."""
    policy: Policy = field(default_factory=Policy)
    seed: int = 0


class Registry:
    """Hosts, places and handles. What changes here serves the queue."""

    def __init__(self, config: FleetConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.scheduler = Scheduler(policy=config.policy, seed=config.seed)
        self.queue = WaitingLine[Request, Placement](
            lambda request: self.scheduler.place(request, clock()),
            lambda placement: self.scheduler.cancel(placement.ticket),
        )
        """Of one tenant: a request for much room is not starved by many for little."""
        self.hosts: dict[str, FleetHost] = {}
        self.sandboxes: dict[str, FleetSandbox] = {}
        """Those of which somebody holds a handle."""

    def add(self, name: str, host: SandboxBackend | HostSpec) -> FleetHost:
        """One more host. Raises ConfigError for a name that is taken or no name."""
        if not name or ":" in name:
            raise ConfigError(
                "a host's name is not empty and has no colon", field="hosts", received=name, fix="rename it"
            )
        added = FleetHost(name, host if isinstance(host, HostSpec) else HostSpec(host))
        self.scheduler.add_host(name, added.capacity)
        self.hosts[name] = added
        return added

    def is_empty(self, name: str) -> bool:
        """Whether nothing of this fleet runs, sleeps or is being made on a host, as far as it is known; a
        dead one is empty. Raises ConfigError."""
        return self.host(name).is_dead or not self.scheduler.hosts[name].reservations

    def remove(self, name: str) -> FleetHost:
        """Forgets a host that is empty."""
        self.scheduler.remove_host(name)
        return self.hosts.pop(name)

    def mark_dead(self, name: str, reason: str) -> list[str]:
        """The host is gone: ids of the sandboxes lost with it. Also for who knows before the heartbeats."""
        lost = self.scheduler.mark_dead(name)
        host = self.host(name)
        host.die(reason)
        for sandbox_id in lost:
            sandbox = self.sandboxes.pop(sandbox_id, None)
            if sandbox is not None:
                sandbox.end(host.lost(sandbox_id))
        return lost

    def suspect(self, host: FleetHost, error: BaseException) -> None:
        """The host did not answer, or failed a start (and one that fails fast looks empty): until it has had
        time for another heartbeat it is the last to be asked. It is not shut out: where all are slow all are
        suspected."""
        host.last_error = f"{type(error).__name__}: {error}"
        if self.hosts.get(host.name) is host:  # else it has left
            until_s = self.clock() + self.config.heartbeat_s + self.config.heartbeat_timeout_s
            self.scheduler.hosts[host.name].suspected_until_s = until_s

    async def place(self, request: Request) -> Placement:
        """A reservation. Raises CapacityError after the longest wait, or at once if too many wait."""
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

    def placed(self, placement: Placement) -> FleetHost:
        """The host of a placement. Raises SandboxLostError where it has died and left since."""
        host = self.hosts.get(placement.host)
        if host is None:
            raise SandboxLostError("its host has left the fleet", field="sandbox", received=placement.host)
        return host

    def forget(self, sandbox: FleetSandbox) -> None:
        """A sandbox has ended: its place is free."""
        self.sandboxes.pop(sandbox.id, None)
        self.scheduler.release(sandbox.id)
        self.queue.serve()

    def wrap(self, host: FleetHost, inner: Sandbox) -> FleetSandbox:
        """A handle for a sandbox whose place is confirmed."""
        sandbox = self.sandboxes[host.id_of(inner.id)] = FleetSandbox(self, host, inner)
        return sandbox

    def host(self, name: str) -> FleetHost:
        """A host by name, dead or alive. Raises ConfigError."""
        host = self.hosts.get(name)
        if host is None:
            raise ConfigError("no such host", field="host", received=name, fix=f"one of {list(self.hosts)}")
        return host

    def locate_sandbox(self, sandbox_id: str) -> tuple[FleetHost, str]:
        """(host, id there) of a sandbox. Raises SandboxMissingError, SandboxLostError."""
        host, inner_id = self._split(sandbox_id, "sandbox", SandboxMissingError)
        if host.is_dead:
            raise host.lost(sandbox_id)
        return host, inner_id

    def locate_snapshot(self, snapshot: str) -> tuple[FleetHost, str]:
        """(host, id there) of a snapshot. Raises SnapshotMissingError, SandboxLostError."""
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
    """`Sandbox` on a host."""

    def __init__(self, registry: Registry, host: FleetHost, inner: Sandbox) -> None:
        super().__init__(host.id_of(inner.id))
        self.host = host
        self.inner = inner
        self._registry = registry
        self._gone: SandboxError | None = None

    async def perform(self, name: str, operation: Operation[Result]) -> Result:
        return await self.attempt(operation)

    async def attempt(self, operation: Operation[Result], undo: Undo | None = None) -> Result:
        """One operation on the host's sandbox. Raises SandboxLostError once the host is dead."""
        if self._gone is not None:
            raise self._gone
        try:
            return await self.host.call(operation(self.inner), undo)
        except (SandboxLostError, SandboxMissingError) as error:
            if isinstance(error, SandboxLostError):
                self._registry.suspect(self.host, error)
            self.end(error)
            self._registry.forget(self)
            raise

    def end(self, reason: SandboxError) -> None:
        """Every later call raises `reason`."""
        self._gone = self._gone or reason

    async def get_info(self) -> SandboxInfo:
        return replace(await super().get_info(), id=self.id)

    async def create_snapshot(
        self, kind: SnapshotKind | None = None, name: str | None = None
    ) -> SnapshotInfo:
        """See Sandbox.create_snapshot. It lies on the sandbox's host, and is restored there."""
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
        """See Sandbox.migrate. Moves it out of the fleet, to a backend that the caller names."""
        moved = await self.attempt(lambda s: s.migrate(target), kill)
        self.end(SandboxMissingError("the sandbox left the fleet", field="sandbox", received=self.id))
        self._registry.forget(self)
        return moved

    async def kill(self) -> None:
        """See Sandbox.kill. Also when its host is dead: there is nothing left to kill then."""
        if self._gone is not None:
            return
        try:
            await super().kill()
        except (SandboxLostError, SandboxMissingError):
            return
        self.end(SandboxMissingError("the sandbox was killed", field="sandbox", received=self.id))
        self._registry.forget(self)

    async def _fork(self, count: int) -> list[Sandbox | SandboxError]:
        """`count` results: a sandbox, or the error that prevented it. Unused places are given back."""
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
        settling = [self._settle(place, copy) for place, copy in zip(used, copies, strict=True)]
        settled = iter(await gather_copies(settling))
        return [_no_room(self.id) if place is None else next(settled) for place in places]

    async def _settle(self, place: Placement, copy: Sandbox | SandboxError) -> Sandbox:
        """A copy on the host for which it was planned. Raises SandboxError."""
        registry, host = self._registry, self.host
        if isinstance(copy, SandboxError):
            registry.scheduler.cancel(place.ticket)
            raise copy
        try:
            if place.host != host.name:
                copy = await self._move(copy, place)
            host = registry.placed(place)
            registry.scheduler.confirm(place.ticket, host.id_of(copy.id), registry.clock())
        except SandboxMissingError as error:
            # The target died in between, and took its reservations along.
            raise host.lost() from error
        except BaseException as error:
            registry.scheduler.cancel(place.ticket)
            if isinstance(error, InfrastructureError) and not isinstance(error, SandboxError):
                raise SandboxError(str(error), field="sandbox", received=self.id) from error
            raise
        return registry.wrap(host, copy)

    async def _move(self, copy: Sandbox, place: Placement) -> Sandbox:
        try:
            target = self._registry.placed(place)
            return await self.host.call(copy.migrate(target.backend), kill)
        except BaseException:
            if not self.host.is_dead:
                await asyncio.shield(copy.kill())
            raise


def _no_room(sandbox_id: str) -> CapacityError:
    return CapacityError(
        "no host has room for another copy, or none to which it can move",
        field="sandbox",
        received=sandbox_id,
        fix="fork fewer, or add hosts",
    )


async def _kill_all(copies: list[Sandbox | SandboxError]) -> None:
    for copy in copies:
        if not isinstance(copy, SandboxError):
            await copy.kill()
