"""A fleet over sandbox servers, whose list may change at runtime.

    listed ──> joins: greeted, measured, used
    draining ──> gets no new sandboxes; running ones stay until they end ──> not draining: used again
    no longer listed ──> as draining, then removed

Running sandboxes are never moved: where the backend copies no processes, a move carries files alone.
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
    """Overrides of the measured Capacity, by field."""
    draining: bool = False
    """Whether the server gets no new sandboxes."""

    def is_same_server(self, other: ServerSpec) -> bool:
        """Whether both have the same address and token."""
        return (self.url, self.token) == (other.url, other.token)


Servers = Mapping[str, ServerSpec]
"""Servers by their host name in the fleet."""


class ServerFleet(Fleet):
    """`SandboxBackend` over named servers. For one event loop. Several clients may share servers: each sees
    only its own sandboxes."""

    def __init__(
        self,
        servers: Servers,
        backend: str | None = None,
        owner: str | None = None,
        config: FleetConfig | None = None,
        poll: Callable[[], Servers | None] | None = None,
        poll_s: float = 2.0,
    ) -> None:
        """`backend`: name of the backend on each server. `owner`: see RemoteBackend; None: a unique name.

        `poll`: called every `poll_s`, in a thread; returns the new list of servers, or None if it has not
        changed.
        """
        self._backend = backend
        self._owner = owner or f"fleet/{uuid.uuid4().hex}"
        self._servers = dict(servers)
        """The servers that are hosts now; `_wanted` are those of the last list."""
        self._wanted = dict(servers)
        self._clients: dict[str, RemoteBackend] = {}
        self._poll, self._poll_s = poll, poll_s
        self._poll_task: asyncio.Task[None] | None = None
        super().__init__({name: self._host(name, spec) for name, spec in servers.items()}, config)
        for name, spec in servers.items():
            if spec.draining:
                self.retire(name)

    @property
    def num_in_use(self) -> int:
        """Number of servers that do not drain."""
        return sum(not spec.draining for spec in self._servers.values())

    def problems(self) -> dict[str, list[str]]:
        """Problems of the servers that do not drain, by name. Blocks; queries all at the same time."""
        clients = {name: self._clients[name] for name, one in self._servers.items() if not one.draining}
        with ThreadPoolExecutor(max(1, len(clients))) as threads:
            answers = list(threads.map(lambda client: client.doctor(), clients.values()))
        return {name: found for name, found in zip(clients, answers, strict=True) if found}

    def doctor(self) -> list[str]:
        return [f"{name}: {one}" for name, found in self.problems().items() for one in found]

    async def start(self) -> None:
        """See Fleet.start. Also starts to poll for changes of the server list."""
        await super().start()
        if self._poll_task is None and self._poll is not None:
            self._poll_task = asyncio.create_task(self._poll_servers(self._poll))

    async def close(self) -> None:
        if self._poll_task is not None:
            await end_tasks(self._poll_task)
        try:
            await super().close()
        finally:
            for client in self._clients.values():  # including those of dead hosts
                await client.disconnect()

    async def set_servers(self, servers: Servers) -> None:
        """Replaces the server list: new servers join; draining or unlisted ones get no new sandboxes. An
        unlisted server is removed at once if nothing runs there, else by a later call."""
        self._wanted = dict(servers)
        for name in list(self._servers):
            spec, known = self._wanted.get(name), self._servers[name]
            if spec is None or not spec.is_same_server(known):
                self.retire(name)
                await self._remove_server(name)
                continue
            if spec.capacity != known.capacity:
                probe = RemoteProbe(self._clients[name], spec.capacity)
                self.registry.host(name).fetch_capacity = probe.capacity
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

    async def _poll_servers(self, poll: Callable[[], Servers | None]) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            servers = await asyncio.to_thread(poll)
            await self.set_servers(self._wanted if servers is None else servers)

    async def _remove_server(self, name: str) -> None:
        client = self._clients[name]
        try:
            if not await self.remove_host(name):
                return
        except SandboxError as error:
            warnings.warn(f"sandbox server {name} has left, with an error: {error}", stacklevel=1)
        del self._servers[name], self._clients[name]
        await client.disconnect()

    def _host(self, name: str, spec: ServerSpec) -> HostSpec:
        client = RemoteBackend(spec.url, spec.token, self._backend, owner=self._owner)
        self._clients[name] = client
        probe = RemoteProbe(client, spec.capacity)
        return HostSpec(client, probe.capacity, probe, client.owns)


class RemoteProbe:
    """`HostProbe` of the host behind a `RemoteBackend`. The server's answer is the heartbeat."""

    def __init__(self, backend: RemoteBackend, overrides: Mapping[str, Any] | None = None) -> None:
        """`overrides`: fields of Capacity that replace the measured ones."""
        self._backend = backend
        self._overrides = overrides or {}

    async def capacity(self) -> Capacity:
        """The capacity of the server's machine. Greets the server first, which kills the sandboxes that an
        earlier client of the same name left there. Raises as `pressure`."""
        await self._backend.hello()
        line = self._backend.connection
        found = line.decode_with(CAPACITY.validate_python, await line.call("GET", "capacity"))
        return replace(found, **self._overrides)

    async def pressure(self) -> Pressure | None:
        """The pressure as the server measures it; None if it measures nothing.

        Not retried: the next heartbeat asks again. Raises SandboxLostError if the server cannot be
        reached, SandboxError for a malformed answer, and what the server raises.
        """
        line = self._backend.connection
        raw = await line.call("GET", "pressure")
        return None if raw is None else line.decode_with(PRESSURE.validate_python, raw)


CAPACITY, PRESSURE = TypeAdapter(Capacity), TypeAdapter(Pressure)
"""Validators of the servers' answers. They raise ValueError or ConfigError."""
