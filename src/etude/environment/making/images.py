"""The image in which a project's tests run: built once, with the project's dependencies but without the
project.

    FROM the base ── RUN pip install ── the image in which tests run, with the project's files on top
                                    └── COPY workspace: added by the Dockerfile of each task

The versions that pip chose are pinned in every task's Dockerfile, so that it builds the same later.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from etude.environment.making.projects import Project
from etude.errors import ResourceError, TaskError
from etude.kit.leftovers import ScratchDirectory
from etude.records import TaskImage
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import find_base
from etude.sandbox.images.building import build_image
from etude.sandbox.images.built import BuildOptions
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Image, Template
from etude.tasks.harbor import WORKSPACE

BASE = "python:3.11-slim"
"""Base image in which a project's packages are installed."""
_FREEZE_S = 120.0
_TAIL_CHARS = 600


@dataclass(frozen=True, slots=True)
class ProjectImage:
    """An image with a project's dependencies, and the Dockerfile lines that build it."""

    image: TaskImage
    dockerfile: str
    """Without the task's own lines."""


def dockerfile_text(project: Project, base: str, requirements: Sequence[str], options: str = "") -> str:
    """The Dockerfile of an image with these packages, or of the base alone. `options`: of pip."""
    install = f"RUN pip install --no-cache-dir {options}{shlex.join(requirements)}\n" if requirements else ""
    env = " ".join(f"{name}={value}" for name, value in _env(project).items())
    return f"FROM {base}\n{install}ENV {env}\nWORKDIR {WORKSPACE}\n"


def _env(project: Project) -> dict[str, str]:
    path = f"{WORKSPACE}/{project.source_root}".rstrip("/")
    return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


async def build_project_image(
    project: Project, store: ImageStore, options: BuildOptions, backend: SandboxBackend
) -> ProjectImage:
    """Builds the image with the newest compatible versions, and again with exactly these.

    Raises TaskError for a project that cannot be installed, ResourceError if nothing can be built here.
    """
    newest = await _build(project, dockerfile_text(project, BASE, project.requirements), store, options)
    text = dockerfile_text(project, BASE, await _list_packages(newest, backend), "--no-deps ")
    image = await _build(project, text, store, options)
    found = TaskImage(image.name, image.layers, dict(image.env), image.workdir, image.user)
    return ProjectImage(found, text)


async def find_project_image(
    project: Project, name: str, store: ImageStore, bases: Mapping[str, str]
) -> ProjectImage:
    """An existing image with all packages. Raises TemplateError if there is none of that name."""
    image = await find_base(name, store, bases)
    found = TaskImage(image.name, image.layers, {**image.env, **_env(project)}, WORKSPACE, image.user)
    return ProjectImage(found, dockerfile_text(project, name, ()))


async def _build(project: Project, text: str, store: ImageStore, options: BuildOptions) -> Image:
    plain = re.sub(r"[^a-z0-9]+", "-", project.name.lower()).strip("-") or "project"
    name = f"made/{plain[:60]}-{blake2b(text.encode(), digest_size=6).hexdigest()}"
    with ScratchDirectory(store.layers.root, "project-") as folder:
        (folder / "Dockerfile").write_text(text)
        try:
            return await build_image(folder, name, store, options=options)
        except TemplateError as error:
            if error.field == "images.bases":
                raise
            raise TaskError(
                f"cannot be installed: {error.message[-_TAIL_CHARS:]}", field="REPO",
                received=f"{project.name} {project.version}",
                fix="check that its requirements can be installed; allow the hosts that pip needs with "
                "`images.allow`, or name a complete image with `--image`",
            ) from error  # fmt: skip


async def _list_packages(image: Image, backend: SandboxBackend) -> list[str]:
    """`pip freeze` of an image; empty if the distribution's own packages were sufficient."""
    async with await backend.create(Template({}, "packages", image)) as sandbox:
        result = await sandbox.commands.run("python3 -m pip freeze --local", _FREEZE_S, {"PYTHONPATH": ""})
    if result.exit_code != 0:
        raise ResourceError(
            f"pip does not list the packages of the image: {result.stderr[-_TAIL_CHARS:]}",
            field="image", received=image.name, fix="use a base image that has Python 3 and pip",
        )  # fmt: skip
    return [row for row in result.stdout.splitlines() if re.fullmatch(r"[\w.-]+==[\w.+!-]+", row)]
