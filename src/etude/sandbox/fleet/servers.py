"""A fleet over sandbox servers, whose list may change while it is at work.

    listed ──> joins: greeted, measured, used
    draining ──> nothing new there; what runs ends as it began ──> not draining: used again
    no longer listed ──> the same, then forgotten

Nothing is moved that somebody works in: a move carries files alone where the backend copies no processes.
"""

from __future__ import annotations

import asyncio
import uuid
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from etude.errors import SandboxError
from etude.kit.tasks import end_tasks
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.fleet.host import HostSpec
from etude.sandbox.fleet.hosts import Capacity, Pressure
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.remote import RemoteBackend


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server of a fleet."""

    url: str
    token: str | None = field(default=None, repr=False)
    capacity: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of its Capacity that are other than what its machine has."""
    draining: bool = False
    """Whether nothing new is to be made there."""

    def is_same_server(self, other: ServerSpec) -> bool:
        """Whether both lead to the same place in the same way."""
        return (self.url, self.token) == (other.url, other.token)


Servers = Mapping[str, ServerSpec]
"""By the names that hosts have in the fleet."""


class ServerFleet(Fleet):
    """`SandboxBackend` over named servers. For one event loop; of several clients of the same servers each
    sees its own sandboxes alone."""

    def __init__(
        self,
        servers: Servers,
        backend: str | None = None,
        owner: str | None = None,
        config: FleetConfig | None = None,
        changed: Callable[[], Servers | None] | None = None,
        poll_s: float = 2.0,
    ) -> None:
        """`backend`: which of each server's. `owner`: see RemoteBackend; unnamed, a name of its own.

        `changed`: asked every `poll_s`, in a thread: the servers as they are to be from now on, or None where
        that is as before.
        """
        self._backend = backend
        self._owner = owner or f"fleet/{uuid.uuid4().hex}"
        self._servers = dict(servers)
        """As hosts have them."""
        self._wanted = dict(servers)
        self._clients: dict[str, RemoteBackend] = {}
        self._changed, self._poll_s = changed, poll_s
        self._following: asyncio.Task[None] | None = None
        super().__init__({name: self._host(name, spec) for name, spec in servers.items()}, config)
        for name, spec in servers.items():
            if spec.draining:
                self.retire(name)

    @property
    def num_in_use(self) -> int:
        """Servers that do not drain."""
        return sum(not spec.draining for spec in self._servers.values())

    def problems(self) -> dict[str, list[str]]:
        """What is wrong with the servers that do not drain, by name. Blocks; all are asked at once."""
        clients = {name: self._clients[name] for name, one in self._servers.items() if not one.draining}
        with ThreadPoolExecutor(max(1, len(clients))) as threads:
            answers = list(threads.map(lambda client: client.doctor(), clients.values()))
        return {name: found for name, found in zip(clients, answers, strict=True) if found}

    def doctor(self) -> list[str]:
        return [f"{name}: {one}" for name, found in self.problems().items() for one in found]

    async def start(self) -> None:
        """See Fleet.start. From now on changes of the list are followed."""
        await super().start()
        if self._following is None and self._changed is not None:
            self._following = asyncio.create_task(self._follow(self._changed))

    async def close(self) -> None:
        if self._following is not None:
            await end_tasks(self._following)
        try:
            await super().close()
        finally:
            for client in self._clients.values():  # those of dead hosts, too
                await client.disconnect()

    async def follow(self, servers: Servers) -> None:
        """Has these servers from now on: new ones join, those that drain or are gone get nothing new. One
        that is gone is forgotten at once if nothing runs there, else by a later call."""
        self._wanted = dict(servers)
        for name in list(self._servers):
            spec, known = self._wanted.get(name), self._servers[name]
            if spec is None or not spec.is_same_server(known):
                self.retire(name)
                await self._forget(name)
                continue
            if spec.capacity != known.capacity:
                probe = RemoteProbe(self._clients[name], spec.capacity)
                self.registry.host(name).ask_capacity = probe.capacity
            if spec.draining:
                self.retire(name)
            elif self.registry.scheduler.hosts[name].retiring:
                self.reopen(name)
            self._servers[name] = spec
        for name, spec in self._wanted.items():
            if name not in self._servers:
                self._servers[name] = spec
                await self.add_host(name, self._host(name, spec))
                if spec.draining:
                    self.retire(name)

    async def _follow(self, changed: Callable[[], Servers | None]) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            servers = await asyncio.to_thread(changed)
            await self.follow(self._wanted if servers is None else servers)

    async def _forget(self, name: str) -> None:
        client = self._clients[name]
        try:
            if not await self.remove_host(name):
                return
        except SandboxError as error:
            warnings.warn(f"sandbox server {name} has left, but: {error}", stacklevel=1)
        del self._servers[name], self._clients[name]
        await client.disconnect()

    def _host(self, name: str, spec: ServerSpec) -> HostSpec:
        client = RemoteBackend(spec.url, spec.token, self._backend, owner=self._owner)
        self._clients[name] = client
        probe = RemoteProbe(client, spec.capacity)
        return HostSpec(client, probe.capacity, probe, client.owns)


class RemoteProbe:
    """`HostProbe` of the host behind a `RemoteBackend`. That the server answers is the heartbeat."""

    def __init__(self, backend: RemoteBackend, given: Mapping[str, Any] | None = None) -> None:
        """`given`: fields of the Capacity that are other than what the machine has."""
        self._backend = backend
        self._given = given or {}

    async def capacity(self) -> Capacity:
        """What the server's machine has. First of all it greets the server, which ends what an earlier client
        of the same name has left there. Raises as `pressure`."""
        await self._backend.hello()
        line = self._backend.line
        found = line.decoded(CAPACITY.validate_python, await line.call("GET", "capacity"))
        return replace(found, **self._given)

    async def pressure(self) -> Pressure | None:
        """The pressure as the server measures it; None if it measures nothing.

        Never sent twice: the next heartbeat asks anew. Raises SandboxLostError if the server cannot be
        reached, SandboxError for an answer that is no pressure, and what the server raises.
        """
        line = self._backend.line
        raw = await line.call("GET", "pressure")
        return None if raw is None else line.decoded(PRESSURE.validate_python, raw)


CAPACITY, PRESSURE = TypeAdapter(Capacity), TypeAdapter(Pressure)
"""As servers tell them. Anything else is a ValueError, or a ConfigError."""
