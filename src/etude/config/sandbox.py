"""Sandboxes and their servers."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator, model_validator

from etude.config.base import HttpAddress, SecretSource, Section


class SandboxServerConfig(Section):
    """One of several servers for a run's sandboxes, under a name of your choice."""

    url: HttpAddress = Field(min_length=1)
    """Address of an `etude sandbox serve`, `http://HOST:PORT`."""
    token: SecretSource = ""
    """Source of its token: `file:PATH` or `env:NAME`. Empty: none is sent."""
    draining: bool = False
    """Whether the server gets no new sandboxes; those that run there continue."""
    cpus: float = Field(default=0.0, ge=0)
    """Number of cores that its sandboxes share; 0: those of its machine."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory that its sandboxes share. Four times as much is promised to them, `sandbox.memory_bytes` each.
    0: its machine's."""
    disk_bytes: int = Field(default=0, ge=0)
    """Disk space that its sandboxes share, which is promised to them only once. 0: its machine's."""


def _check_names(servers: dict[str, SandboxServerConfig]) -> dict[str, SandboxServerConfig]:
    for name in servers:
        if not name or ":" in name:
            raise ValueError(f"a server's name is not empty and has no colon, received {name!r}")
    return servers


Servers = Annotated[dict[str, SandboxServerConfig], AfterValidator(_check_names)]


class ServersFile(Section):
    """Contents of the file named by `sandbox.servers_file`."""

    servers: Servers = Field(min_length=1)
    """The servers, by name."""


class SandboxConfig(Section):
    """Sandboxes in which the agent's tools run."""

    backend: str = "local"
    """`local`: Linux namespaces. `gvisor`: a kernel in user space, 3 to 4 times slower. `vm`: a virtual
    machine under QEMU, slow without KVM. `docker` and `podman`: containers, of the image `python:3.11-slim`
    or, as `podman:IMAGE`, of another one that the engine has. `unisolated`: plain subprocesses, for machines
    that forbid namespaces; the agent's code can then do whatever you can."""
    server: HttpAddress = ""
    """Address of an `etude sandbox serve` that creates the sandboxes, `http://HOST:PORT`; `backend` then
    names one of its backends. Empty: they are created where sessions run, or by `servers`."""
    token: SecretSource = ""
    """Source of that server's token: `file:PATH` or `env:NAME`. Empty: none is sent."""
    servers: Servers = Field(default_factory=dict[str, SandboxServerConfig])
    """Several servers over which sandboxes are distributed; see docs/fleet.md."""
    servers_file: str = ""
    """TOML file that lists them instead, in sections `[servers.NAME]`. It is read again whenever it changes,
    so that servers can join, drain and leave during the run."""
    allow_private: list[str] = Field(default_factory=list[str])
    """`IP:PORT` of servers with private addresses that sandboxes may reach where their tasks allow the host;
    no task can allow that itself. Servers have an option for it: `etude sandbox serve --allow-private`."""
    patience_s: float = Field(default=60.0, ge=0)
    """Seconds that a session waits for a server that does not answer, or for room on any of several, before
    its attempt fails."""
    memory_bytes: int = Field(default=512 << 20, ge=16 << 20)
    """Memory limit of one sandbox."""
    test_timeout_s: float = Field(default=2.0, gt=0)
    """Time limit of one test run in seconds. Time spent waiting for a processor or a disk does not count, up
    to a minute."""
    command_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one command in seconds, counted in the same way."""

    @field_validator("backend")
    @classmethod
    def _backend_is_one(cls, value: str) -> str:
        if not re.fullmatch("local|gvisor|vm|unisolated|(docker|podman)(:.+)?", value):
            raise ValueError(
                f"must be local, gvisor, vm, unisolated, docker, podman, docker:IMAGE or podman:IMAGE, "
                f"received {value!r}"
            )
        return value

    @model_validator(mode="after")
    def _server_is_whole(self) -> SandboxConfig:
        if self.token and not self.server:
            raise ValueError(f"server: must be named with token, received {self.server!r}")
        if bool(self.server) + bool(self.servers) + bool(self.servers_file) > 1:
            raise ValueError("server, servers, servers_file: set only one of them; servers may be several")
        if self.allow_private and (self.server or self.servers or self.servers_file):
            raise ValueError(
                "allow_private: give it to each server instead, `etude sandbox serve --allow-private`"
            )
        return self
