"""Sandbox backends that work here."""

from __future__ import annotations

import asyncio
import dataclasses

from etude.config import SandboxConfig
from etude.config.secrets import read_secret
from etude.errors import ConfigError, ResourceError
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import SandboxBackend


def open_run_backend(settings: SandboxConfig, owner: str | None = None) -> SandboxBackend:
    """The sandboxes of a run: of servers if it names any, else made in this process.

    `owner`: names who makes them, the same when it is started again; what it left on a server when it was
    killed is ended then. Raises ResourceError with what to enable, ConfigError for a server that does not
    answer or takes the token for a wrong one; of several, where none is any better.
    """
    if settings.servers or settings.servers_file:
        return _open_servers(settings, owner, all_of_them=False)
    if not settings.server:
        return open_checked_backend(settings.backend)
    from etude.sandbox.remote import RemoteBackend  # httpx is not part of the core's needs
    from etude.sandbox.remote.connection import RETRY

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
            "this server makes no sandboxes: " + "; ".join(problems),
            field="sandbox.server",
            received=settings.server,
            fix="start it with `etude sandbox serve`, say where its token is with sandbox.token, "
            "or leave sandbox.server empty",
        )
    return backend


def check_run_backend(settings: SandboxConfig) -> None:
    """Looks, before a run has a directory, whether its sandboxes can be made: of several servers by each.
    Raises as open_run_backend."""
    if settings.servers or settings.servers_file:
        opened = _open_servers(settings, None, all_of_them=True)
    else:
        opened = open_run_backend(settings)
    asyncio.run(opened.close())


def _open_servers(settings: SandboxConfig, owner: str | None, all_of_them: bool) -> SandboxBackend:
    """`all_of_them`: whether each server must be fit for use now, and not one at least."""
    from etude.controller.fleets import open_fleet  # httpx is not part of the core's needs

    fleet = open_fleet(settings, owner)
    problems = fleet.problems()
    if problems and (all_of_them or len(problems) == fleet.num_in_use):
        raise ConfigError(
            "these servers make no sandboxes: "
            + "; ".join(f"{name}: {', '.join(found)}" for name, found in problems.items()),
            field="sandbox.servers_file" if settings.servers_file else "sandbox.servers",
            received=settings.servers_file or list(settings.servers),
            fix="start them with `etude sandbox serve`, say where their tokens are, or take them out",
        )
    return fleet


def open_checked_backend(
    name: str, field: str = "sandbox.backend", unisolated: str = "--set sandbox.backend=unisolated"
) -> SandboxBackend:
    """A sandbox backend that works here. Raises ResourceError with what to enable, ConfigError.

    `field`: what named it; `unisolated`: how its user would accept no isolation.
    """
    backend = open_backend(name)
    problems = backend.doctor()
    if problems:
        raise ResourceError(
            "sandboxes cannot be made here: " + "; ".join(problems),
            field=field,
            received=name,
            fix=f"do what is said above, or accept no isolation with {unisolated}",
        )
    return backend


def open_people_backend(name: str) -> SandboxBackend:
    """The same, named on a command line."""
    return open_checked_backend(name, "--backend", "--backend unisolated")
