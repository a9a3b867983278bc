"""The sandbox of a person's session: what it holds besides the copy of the directory, from the command line.

--venv DIR, or found ──> shown at its own path, first in PATH ──┐
--image, --dockerfile ─> the sandbox's root ────────────────────┼──> Surroundings ──> Conversation
.git ──────────────────> readable ──────────────────────────────┤
--allow HOST ──────────> the way out ───────────────────────────┘
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.controller.agent.in_place import check_in_place
from etude.controller.backends import open_people_backend
from etude.errors import ConfigError
from etude.sandbox.backends import ENGINES, IMAGES
from etude.sandbox.images.base_sources import find_base
from etude.sandbox.images.building import build_image
from etude.sandbox.images.built import BuildOptions
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.host_view import HostView, find_environment
from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.template import Image, Template
from etude.sandbox.types import NO_NETWORK, Network

NO_VENV = "none"


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """The choice of a sandbox on the command line."""

    backend: str = "local"
    venv: str = ""
    """Directory of a Python environment; `none`; empty: the project's own if there is one."""
    image: str = ""
    """Name of an image in the store, or of one that is built from Debian's packages."""
    dockerfile: str = ""
    """A Dockerfile, built in its directory."""
    allow: tuple[str, ...] = ()
    """Hosts that commands may reach, and RUN of the Dockerfile."""
    allow_private: tuple[str, ...] = ()
    """Private addresses (`IP:port`) that such hosts may nevertheless resolve to."""
    in_place: bool = False
    """Whether the agent works on the directory itself."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a sandbox that does not support `in_place`."""
        image = f"--image {self.image}" if self.image else f"--dockerfile {self.dockerfile}"
        has_image = bool(self.image or self.dockerfile)
        if self.in_place and (has_image or self.backend not in ("local", "unisolated")):
            raise ConfigError(
                "only the local and the unisolated backend work in the directory itself, without an image",
                field="--in-place",
                received=image if has_image else f"--backend {self.backend}",
                fix="leave it out: the agent then works on a copy",
            )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Settings and files of a sandbox, besides the files of the directory."""

    image: Image | None = None
    network: Network = NO_NETWORK
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Files of the harness: never written back."""
    has_environment: bool = False
    """Whether the project's own environment is available: then its pytest runs the tests."""
    in_place: bool = False
    """Whether the directory itself is the workspace."""


async def open_surroundings(
    choice: SandboxChoice, project: Path, note: Callable[[str], None]
) -> tuple[SandboxBackend, Surroundings]:
    """Opens the backend for the sandboxes of one directory (absolute, without links), and their surroundings.

    `note`: called with messages for the person. Raises ConfigError, ResourceError, TemplateError.
    """
    network = Network(choice.allow)
    if choice.in_place:
        check_in_place(project)
    if choice.image or choice.dockerfile:
        _check_image_choice(choice)
        image = await _find_image(choice, network, note)
        backend = open_people_backend(choice.backend, allow_private=choice.allow_private)
        note(f"image {image.name}: the files are in {Template(image=image).workspace}")
        return backend, Surroundings(image, network, {}, has_environment=True)
    if choice.backend != "local":
        if choice.venv not in ("", NO_VENV):
            raise ConfigError(
                "only the local backend can show a Python environment of this machine",
                field="--venv",
                received=f"{choice.venv} with --backend {choice.backend}",
                fix="leave one of them out",
            )
        backend = open_people_backend(choice.backend, allow_private=choice.allow_private)
        if choice.in_place:
            note("in place and not isolated: commands run with all of your permissions")
        return backend, Surroundings(
            network=network, has_environment=choice.in_place, in_place=choice.in_place
        )
    view = HostView(project, in_place=choice.in_place)
    has_environment = _add_environment(view, project, choice.venv, note)
    if choice.in_place:
        view.check_in_place()
        view.git = await asyncio.to_thread(_read_git_author)
        note("in place: commands change the directory itself, and nothing else of yours")
        backend = open_people_backend("local", view, choice.allow_private)
        return backend, Surroundings(None, network, {}, has_environment, in_place=True)
    files = {".git": f"gitdir: {project}/.git\n".encode()} if view.add_history() else {}
    backend = open_people_backend("local", view, choice.allow_private)
    return backend, Surroundings(None, network, files, has_environment)


def _add_environment(view: HostView, project: Path, venv: str, note: Callable[[str], None]) -> bool:
    """Adds the Python environment; returns whether there is one. Raises ConfigError for a named environment
    that cannot be used; for one that was only found, notes the reason."""
    if venv == NO_VENV:
        return False
    if venv:
        view.add_python(Path(venv).expanduser())
        return True
    found = find_environment(project)
    if found is None:
        return False
    try:
        view.add_python(found)
    except ConfigError as error:
        view.directories.clear()
        view.hops.clear()
        note(f"{found} is not in the sandbox: {error.message}; {error.fix}")
        return False
    note(f"Python of the sandbox: {found}")
    return True


def _read_git_author() -> str:
    """The author of commits from this user's git configuration, as a section of such a configuration."""
    lines: list[str] = []
    for key in ("name", "email"):
        command = ("git", "config", "--global", "--get", f"user.{key}")
        try:
            value = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""
        lines += [f"\t{key} = {json.dumps(value, ensure_ascii=False)}\n"] if value else []
    return "[user]\n" + "".join(lines)


def _check_image_choice(choice: SandboxChoice) -> None:
    if choice.image and choice.dockerfile:
        raise ConfigError(
            "contradicts --image",
            field="--dockerfile",
            received=choice.dockerfile,
            fix="leave one of them out",
        )
    if choice.venv not in ("", NO_VENV):
        raise ConfigError(
            "a sandbox with an image cannot show this machine's Python environment",
            field="--venv",
            received=choice.venv,
            fix="leave it out, or install the project's packages in the image",
        )
    if choice.backend != "local":
        engine = choice.backend.partition(":")[0] in ENGINES
        raise ConfigError(
            "stored images run only with the local backend",
            field="--image" if choice.image else "--dockerfile",
            received=f"--backend {choice.backend}",
            fix="name an image of the engine: --backend podman:IMAGE" if engine else "leave --backend out",
        )


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


async def _find_image(choice: SandboxChoice, network: Network, note: Callable[[str], None]) -> Image:
    store = ImageStore(default_state_directory() / IMAGES)
    if choice.image:
        return await find_base(choice.image, store)
    file = _absolute(choice.dockerfile)
    if not file.is_file():
        raise ConfigError(
            "there is no such file", field="--dockerfile", received=choice.dockerfile, fix="name a Dockerfile"
        )
    name = "agent/" + (re.sub(r"[^a-z0-9]+", "-", file.parent.name.lower()).strip("-") or "project")[:60]
    note(f"building {file}")
    options = BuildOptions(network=network, allow_private=choice.allow_private)
    return await build_image(file.parent, name, store, dockerfile=file.name, options=options)
