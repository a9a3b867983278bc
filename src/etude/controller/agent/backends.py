"""The sandboxes of people's sessions."""

from __future__ import annotations

from etude.errors import ResourceError
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import SandboxBackend


def open_people_backend(name: str) -> SandboxBackend:
    """A sandbox backend that works here. Raises ResourceError with what to enable, ConfigError."""
    backend = open_backend(name)
    problems = backend.doctor()
    if problems:
        raise ResourceError(
            "sandboxes cannot be made here: " + "; ".join(problems),
            field="--backend",
            received=name,
            fix="do what is said above, or accept no isolation with --backend unisolated",
        )
    return backend
