"""Resolves the images of tasks: found by name, or built from `environment/Dockerfile`.

docker_image ──> images.bases, the store, Debian's packages ──┐
Dockerfile ────> built, FROM the same names ──────────────────┴──> layers of the store ──> task.machine.image
                                                                        └──> an engine (podman, docker)
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from etude.config.images import ImagesConfig
from etude.errors import TaskError
from etude.records import Task, TaskImage, TaskMachine
from etude.sandbox.backends import ENGINES, IMAGES
from etude.sandbox.containers.backend import ContainerBackend
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import find_base
from etude.sandbox.images.building import build_image
from etude.sandbox.images.built import BuildOptions
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import export_image
from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.template import Image
from etude.sandbox.types import Network

_BACKENDS = ("local", *ENGINES)


class TaskImages:
    """Finds images for the tasks of one set, concurrently. Equal images are found once."""

    def __init__(self, backend: str, settings: ImagesConfig | None = None) -> None:
        """`backend`: name of the backend that runs them (`sandbox.backend`)."""
        settings = settings or ImagesConfig()
        self._backend = backend
        self._engine = backend.partition(":")[0]
        self._bases = settings.bases
        self._options = BuildOptions(
            settings.bases, Network(tuple(settings.allow)), tuple(settings.allow_private), settings.volumes
        )
        self._found: dict[str, TaskImage] = {}
        self._finding: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def find(self, task: Task) -> Task:
        """The task with the images of its machine and of its verifiers' machines. Raises TaskError,
        TemplateError or ResourceError for an image that cannot be found or built."""
        if task.machine is not None:
            task = replace(task, machine=await self._with_image(task, task.machine))
        scripts = list(task.verifiers)
        for number, script in enumerate(scripts):
            if script.machine is not None:
                scripts[number] = replace(script, machine=await self._with_image(task, script.machine))
        return task.with_verifiers(scripts)

    async def _with_image(self, task: Task, machine: TaskMachine) -> TaskMachine:
        if machine.is_host:
            return machine
        if self._engine not in _BACKENDS:
            raise TaskError(
                f"needs an image, but {self._backend} cannot run task images",
                field="task.toml: environment",
                received=machine.docker_image or f"{machine.context}/Dockerfile",
                fix=f"use one of the backends {', '.join(_BACKENDS)}",
            )
        key = machine.docker_image or f"{task.directory}/{machine.context}"
        async with self._finding[key]:
            if key not in self._found:
                self._found[key] = await self._find(task, machine)
        if self._engine in ENGINES:
            _check_users(task, self._found[key])
        return replace(machine, image=self._found[key])

    async def _find(self, task: Task, machine: TaskMachine) -> TaskImage:
        name = machine.docker_image
        store = ImageStore(default_state_directory() / IMAGES)
        if name:
            if self._engine in ENGINES and name not in self._bases and not store.has(name):
                # By its id: the name may be given to another image later.
                return _task_image(await ContainerBackend(self._engine).image(name))
            image = await find_base(name, store, self._bases)
        else:
            assert task.directory is not None, "read from there"
            options = replace(self._options, deadline_s=machine.build_timeout_s)
            context = Path(task.directory) / machine.context
            image = await build_image(context, _image_name(context), store, options=options)
        return _task_image(image if self._engine not in ENGINES else await self._loaded(image, store))

    async def _loaded(self, image: Image, store: ImageStore) -> Image:
        """Loads an image of the store into the engine, once, under a name with its digest."""
        engine = ContainerBackend(self._engine).engine
        name = f"localhost/etude-task:{image.digest}"
        try:
            await engine.image(name)
        except TemplateError:
            with tempfile.TemporaryDirectory(prefix="etude-image-") as folder:
                archive = Path(folder, "image.tar")
                await asyncio.to_thread(export_image, replace(image, name=name), store, archive)
                await engine.load_image(archive)
        return replace(image, name=name, layers=())


def _task_image(image: Image) -> TaskImage:
    return TaskImage(image.name, image.layers, dict(image.env), image.workdir, image.user)


def _check_users(task: Task, image: TaskImage) -> None:
    """Raises TaskError for users other than root, which containers do not support."""
    users = [
        ("the image's USER", image.user),
        ("task.toml: agent.user", task.machine.user if task.machine is not None else ""),
        *(("task.toml: verifier.user", script.user) for script in task.verifiers),
    ]
    for field, user in users:
        if user not in ("", "root", "0"):
            raise TaskError(
                "must be root: a task's commands run as root in containers",
                field=field,
                received=user,
                fix="use the local backend, which supports other users",
            )


def _image_name(context: Path) -> str:
    """The name of the image built from a directory, after its task."""
    plain = re.sub(r"[^a-z0-9]+", "-", context.parent.name.lower()).strip("-") or "task"
    plain = plain if context.name == "environment" else f"{plain[:50]}-{context.name}"
    return f"harbor/{plain[:60]}"
