"""The fleet's books: which hosts there are, which sandbox lives where, who holds a handle of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from etude.errors import ConfigError, SandboxError
from etude.sandbox.errors import CapacityError, SandboxLostError, SandboxMissingError, SnapshotMissingError
from etude.sandbox.fleet.host import FleetHost, HostSpec
from etude.sandbox.fleet.hosts import Placement, Policy, Request
from etude.sandbox.fleet.sandbox import FleetSandbox
from etude.sandbox.fleet.scheduler import Scheduler
from etude.sandbox.interface import Sandbox
from etude.sandbox.waiting import WaitingLine


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

    def add(self, name: str, spec: HostSpec) -> FleetHost:
        """One more host. Raises ConfigError for a name that is taken or no name."""
        if not name or ":" in name:
            raise ConfigError(
                "a host's name is not empty and has no colon", field="hosts", received=name, fix="rename it"
            )
        host = FleetHost(name, spec)
        self.scheduler.add_host(name, host.capacity)
        self.hosts[name] = host
        return host

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
