"""The sandbox servers of a run, as its configuration or a file lists them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from etude.config import SandboxConfig, SandboxServerConfig, ServersFile, load_section
from etude.config.secrets import read_secret
from etude.errors import ConfigError, EtudeError
from etude.sandbox.fleet.hosts import Policy
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.fleet.servers import ServerFleet, Servers, ServerSpec

_HEARTBEAT_TIMEOUT_S = 5.0
"""A server that is alive but busy must not cost the sessions on it."""
_MEMORY_OVERCOMMIT = 4.0
"""Sandboxes use a part of what they may; and a session that has one waits for another to be graded in."""


class ListedServers:
    """The servers of a file, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text: bytes | None = None
        """As it was last read."""

    def read(self) -> Servers:
        """The servers now. Raises ConfigError."""
        try:
            self._text = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror}",
                field="sandbox.servers_file",
                received=str(self._path),
                fix="name a TOML file with sections [servers.NAME]",
            ) from error
        return specs_of(load_section(ServersFile, self._path).servers, "servers")

    def changed(self) -> Servers | None:
        """The servers, where they are others than before. A file that cannot be used changes nothing; it is
        told of once."""
        try:
            if self._path.read_bytes() == self._text:
                return None
            return self.read()
        except (EtudeError, OSError) as error:
            warnings.warn(f"the sandbox servers stay as they are: {error}", stacklevel=1)
            return None


def specs_of(servers: Mapping[str, SandboxServerConfig], section: str) -> Servers:
    """Servers as a fleet wants them. Raises ConfigError for a token that cannot be read."""
    return {name: _spec_of(f"{section}.{name}", server) for name, server in servers.items()}


def _spec_of(section: str, server: SandboxServerConfig) -> ServerSpec:
    given = {"cpus": server.cpus, "memory_bytes": server.memory_bytes, "disk_bytes": server.disk_bytes}
    return ServerSpec(
        server.url,
        read_secret(server.token, f"{section}.token"),
        {name: value for name, value in given.items() if value},
        server.draining,
    )


def open_fleet(settings: SandboxConfig, owner: str | None) -> ServerFleet:
    """The fleet of a run; no server has been asked yet. Raises ConfigError where the list cannot be read."""
    changed: Callable[[], Servers | None] | None = None
    if settings.servers_file:
        listed = ListedServers(Path(settings.servers_file))
        servers, changed = listed.read(), listed.changed
    else:
        servers = specs_of(settings.servers, "sandbox.servers")
    config = FleetConfig(
        heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
        queue_wait_s=settings.patience_s,
        # Sessions on busy servers are slow, and none fails for it.
        policy=Policy(max_cpu_pressure=math.inf, memory_overcommit=_MEMORY_OVERCOMMIT),
    )
    return ServerFleet(servers, settings.backend, owner, config, changed)
