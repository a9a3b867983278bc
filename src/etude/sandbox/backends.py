"""Opens a sandbox backend by its configured name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from etude.errors import ConfigError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.unisolated import UnisolatedBackend
from etude.sandbox.machine_backend import MachineBackend, default_state_directory
from etude.sandbox.network.rules import parse_private

ENGINES = ("docker", "podman")
IMAGES = "images"
"""Directory of the image store, below the state directory."""


def open_backend(name: str, state: Path | None = None, allow_private: Sequence[str] = ()) -> SandboxBackend:
    """A new backend, not yet started. `state`: directory of snapshots and images, if not the default one.
    `allow_private`: `IP:port`s of private addresses that sandboxes may reach if their network allows it.

    `docker:IMAGE` and `podman:IMAGE` name the image of sandboxes whose template has none. Raises ConfigError
    for an unknown name or an invalid address.
    """
    backend = _open_named(name, state)
    if isinstance(backend, MachineBackend):
        parse_private(allow_private)  # to report an invalid one at once
        backend.allow_private = tuple(allow_private)
    return backend


def _open_named(name: str, state: Path | None) -> SandboxBackend:
    engine, colon, image = name.partition(":")
    if engine in ENGINES and (image or not colon):
        return _open_containers(engine, image, state)
    if name not in BACKENDS:
        raise ConfigError(
            "unknown sandbox backend",
            field="sandbox.backend",
            received=name,
            fix="one of " + ", ".join((*BACKENDS, *ENGINES, *(f"{program}:IMAGE" for program in ENGINES))),
        )
    return BACKENDS[name](state)


def _open_containers(engine: str, image: str, state: Path | None) -> SandboxBackend:
    from etude.sandbox.containers.backend import ContainerBackend
    from etude.sandbox.containers.engine import IMAGE

    return ContainerBackend(engine, image or IMAGE, state)


def _local(state: Path | None) -> SandboxBackend:
    images = (state or default_state_directory()) / IMAGES
    return LocalBackend(state, images if (images / "layers").is_dir() else None)


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
    "unisolated": UnisolatedBackend,
}
"""`unisolated` is for trusted code only, and never chosen by default."""
