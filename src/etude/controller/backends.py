"""Sandbox backends that work here."""

from __future__ import annotations

from etude.errors import ResourceError
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import SandboxBackend


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
