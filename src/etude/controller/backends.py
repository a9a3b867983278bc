"""Opens sandbox backends, and checks that they work on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etude.config import SandboxConfig, SandboxServerConfig, ServersFile, load_section
from etude.errors import ConfigError, EtudeError, ResourceError
from etude.kit.secrets import read_secret
from etude.sandbox.backends import open_backend
from etude.sandbox.fleet.hosts import Policy
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.fleet.servers import ServerFleet, Servers, ServerSpec
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.host_view import HostView
from etude.sandbox.remote import RemoteBackend
from etude.sandbox.remote.connection import RETRY

_HEARTBEAT_TIMEOUT_S = 5.0
"""Long enough that a busy server does not lose its sessions."""
_MEMORY_OVERCOMMIT = 4.0
"""Sandboxes use a part of their limit; and a session with one sandbox waits for another to be graded in."""


class ListedServers:
    """The servers listed in a file, which is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text: bytes | None = None
        """The file's contents when it was last read."""

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

    def read_changes(self) -> Servers | None:
        """The servers if the file has changed, else None. A file that cannot be used is reported once."""
        try:
            if self._path.read_bytes() == self._text:
                return None
            return self.read()
        except (EtudeError, OSError) as error:
            warnings.warn(f"the list of sandbox servers is not updated: {error}", stacklevel=1)
            return None


def specs_of(servers: Mapping[str, SandboxServerConfig], section: str) -> Servers:
    """Specifications of servers, for a fleet. Raises ConfigError for a token that cannot be read."""
    specs: dict[str, ServerSpec] = {}
    for name, server in servers.items():
        given = {"cpus": server.cpus, "memory_bytes": server.memory_bytes, "disk_bytes": server.disk_bytes}
        limits = {resource: value for resource, value in given.items() if value}
        token = read_secret(server.token, f"{section}.{name}.token")
        specs[name] = ServerSpec(server.url, token, limits, server.draining)
    return specs


def open_fleet(settings: SandboxConfig, owner: str | None) -> ServerFleet:
    """The sandbox servers of a run; none is contacted yet. Raises ConfigError for an unreadable list."""
    changed: Callable[[], Servers | None] | None = None
    if settings.servers_file:
        listed = ListedServers(Path(settings.servers_file))
        servers, changed = listed.read(), listed.read_changes
    else:
        servers = specs_of(settings.servers, "sandbox.servers")
    config = FleetConfig(
        heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
        queue_wait_s=settings.patience_s,
        # Sessions on busy servers are slow, but do not fail.
        policy=Policy(max_cpu_pressure=math.inf, memory_overcommit=_MEMORY_OVERCOMMIT),
    )
    return ServerFleet(servers, settings.backend, owner, config, changed)


def open_run_backend(
    settings: SandboxConfig, owner: str | None = None, *, all_of_them: bool = False
) -> SandboxBackend:
    """The sandbox backend of a run: its servers, if it names any, else one in this process.

    `owner`: name of this client, the same after a restart: sandboxes that it left on a server when it was
    killed are ended then. Raises ResourceError with what to enable, ConfigError for a server that does not
    answer or rejects the token; with several servers, only where none can be used, or with `all_of_them`
    where one cannot.
    """
    if settings.servers or settings.servers_file:
        return _open_servers(settings, owner, all_of_them)
    if not settings.server:
        return open_checked_backend(settings.backend, allow_private=settings.allow_private)
    backend = RemoteBackend(
        settings.server,
        read_secret(settings.token, "sandbox.token"),
        settings.backend,
        backoff=dataclasses.replace(RETRY, attempts=None, within_s=settings.patience_s),
        owner=owner,
    )
    problems = backend.doctor()
    if problems:
        raise ConfigError(
            "this server cannot create sandboxes: " + "; ".join(problems),
            field="sandbox.server",
            received=settings.server,
            fix="start it with `etude sandbox serve`, name its token with sandbox.token, "
            "or leave sandbox.server empty",
        )
    return backend


def check_run_backend(settings: SandboxConfig) -> None:
    """Checks that a run's sandboxes can be made, on each of its servers. Raises as open_run_backend."""
    asyncio.run(open_run_backend(settings, all_of_them=True).close())


def _open_servers(settings: SandboxConfig, owner: str | None, all_of_them: bool) -> SandboxBackend:
    """`all_of_them`: whether every server must be usable now, rather than at least one."""
    fleet = open_fleet(settings, owner)
    problems = fleet.problems()
    if problems and (all_of_them or len(problems) == fleet.num_in_use):
        raise ConfigError(
            "these servers cannot create sandboxes: "
            + "; ".join(f"{name}: {', '.join(found)}" for name, found in problems.items()),
            field="sandbox.servers_file" if settings.servers_file else "sandbox.servers",
            received=settings.servers_file or list(settings.servers),
            fix="start them with `etude sandbox serve`, name their tokens, or remove them",
        )
    return fleet


def open_checked_backend(
    name: str,
    field: str = "sandbox.backend",
    unisolated: str = "--set sandbox.backend=unisolated",
    allow_private: Sequence[str] = (),
) -> SandboxBackend:
    """A sandbox backend that works here. Raises ResourceError with what to enable, ConfigError.

    `field`: the setting that names it; `unisolated`: the option by which the user would accept no isolation;
    `allow_private`: see `open_backend`.
    """
    backend = open_backend(name, allow_private=allow_private)
    problems = backend.doctor()
    if problems:
        raise ResourceError(
            "sandboxes cannot be created here: " + "; ".join(problems),
            field=field,
            received=name,
            fix=f"fix these problems, or accept no isolation with {unisolated}",
        )
    return backend


def open_people_backend(
    name: str, view: HostView | None = None, allow_private: Sequence[str] = ()
) -> SandboxBackend:
    """As `open_checked_backend`, for a name from the command line. `view`: further directories of the host
    that local sandboxes see; `allow_private`: see `open_backend`."""
    backend = open_checked_backend(name, "--backend", "--backend unisolated", allow_private)
    if isinstance(backend, LocalBackend):
        backend.view = view
    return backend
