"""From a configured name to a backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.errors import ConfigError
from etude.sandbox.fake import MemoryBackend
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.unisolated import UnisolatedBackend
from etude.sandbox.machine_backend import default_state_directory

ENGINES = ("docker", "podman")
IMAGES = "images"
"""Directory of the image store, below the state directory."""


def open_backend(name: str, state: Path | None = None) -> SandboxBackend:
    """A new backend, not yet started. `state`: where snapshots and images lie, if not in the usual place.

    `docker:IMAGE` and `podman:IMAGE` name the image of sandboxes whose template has none. Raises ConfigError
    for an unknown name.
    """
    engine, colon, image = name.partition(":")
    if engine in ENGINES and (image or not colon):
        return _open_containers(engine, image, state)
    if name not in BACKENDS:
        raise ConfigError(
            "unknown sandbox backend",
            field="sandbox.backend",
            received=name,
            fix="one of " + ", ".join((*BACKENDS, *ENGINES, *(f"{one}:IMAGE" for one in ENGINES))),
        )
    return BACKENDS[name](state)


def _open_containers(engine: str, image: str, state: Path | None) -> SandboxBackend:
    from etude.sandbox.containers.arguments import Setup
    from etude.sandbox.containers.backend import ContainerBackend

    return ContainerBackend(engine, Setup(image) if image else None, state)


def _local(state: Path | None) -> SandboxBackend:
    images = (state or default_state_directory()) / IMAGES
    return LocalBackend(state, images if (images / "layers").is_dir() else None)


def _unisolated(state: Path | None) -> SandboxBackend:
    return UnisolatedBackend(state)


def _memory(state: Path | None) -> SandboxBackend:
    return MemoryBackend()


def _gvisor(state: Path | None) -> SandboxBackend:
    from etude.sandbox.gvisor.backend import GvisorBackend

    return GvisorBackend(state)


def _vm(state: Path | None) -> SandboxBackend:
    from etude.sandbox.vm.backend import VmBackend

    return VmBackend(state)


BACKENDS: dict[str, Callable[[Path | None], SandboxBackend]] = {
    "local": _local,
    "gvisor": _gvisor,
    "vm": _vm,
    "unisolated": _unisolated,
    "memory": _memory,
}
"""`unisolated` and `memory` are for code that you trust, and only by name."""
