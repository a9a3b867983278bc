"""Sandbox backends that work here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from etude.config import SandboxConfig
from etude.config.secrets import read_secret
from etude.errors import ConfigError, ResourceError
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import SandboxBackend

_FIRST_PAUSES_S = (0.1, 0.5)
_PAUSE_S = 2.0
"""Between two calls to a server that does not answer."""


def open_run_backend(settings: SandboxConfig, owner: str | None = None) -> SandboxBackend:
    """The sandboxes of a run: of a server if it names one, else made in this process.

    `owner`: names who makes them, the same when it is started again; what it left on the server when it was
    killed is ended then. Raises ResourceError with what to enable, ConfigError for a server that does not
    answer or takes the token for a wrong one.
    """
    if not settings.server:
        return open_checked_backend(settings.backend)
    from etude.sandbox.remote import RemoteBackend  # httpx is not part of the core's needs

    backend = RemoteBackend(
        settings.server,
        read_secret(settings.token, "sandbox.token"),
        settings.backend,
        retry_s=tuple(_pauses(settings.patience_s)),
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


def _pauses(patience_s: float) -> Iterator[float]:
    """Pauses between calls that add up to `patience_s`."""
    for pause_s in itertools.chain(_FIRST_PAUSES_S, itertools.repeat(_PAUSE_S)):
        if patience_s <= 0:
            return
        yield min(pause_s, patience_s)
        patience_s -= pause_s
