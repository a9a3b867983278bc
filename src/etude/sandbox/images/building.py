"""Images for tasks: built from a Dockerfile, or by the name that FROM would have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.bases import DebianBases
from etude.sandbox.images.builder import Builder
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import import_image
from etude.sandbox.images.stage import finished
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.runner import SandboxRunner
from etude.sandbox.template import Image

_ARCHIVES = ("oci", "oci-archive", "docker-archive")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What holds for all builds of a store."""

    bases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name in FROM -> `oci:DIR`, `oci-archive:FILE`, `docker-archive:FILE`, or an image of the store."""
    deadline_s: float = 900.0


async def build_image(
    context: Path, name: str, store: ImageStore, *, options: BuildOptions = BuildOptions()
) -> Image:
    """Builds the Dockerfile of a directory. Raises TemplateError for what it or its bases get wrong."""
    for base in options.bases:
        await base_image(base, store, options.bases)
    root = store.layers.root
    backend = LocalBackend(root.parent, root)
    try:
        builder = Builder(store, SandboxRunner(backend), DebianBases(store), options.deadline_s)
        async with asyncio.timeout(options.deadline_s):
            return (await builder.build(context, name)).image
    except TimeoutError as error:
        raise TemplateError(
            "takes too long to build", field="Dockerfile", received=f"{options.deadline_s:g} s"
        ) from error
    finally:
        await backend.close()


async def base_image(name: str, store: ImageStore, bases: Mapping[str, str] | None = None) -> Image:
    """What FROM `name` starts with. Raises TemplateError if it cannot be had."""
    kind, _, place = (bases or {}).get(name, "").partition(":")
    if kind in _ARCHIVES:
        return await asyncio.to_thread(import_image, Path(place), store, name)
    if kind or store.has(name):
        return await asyncio.to_thread(store.load, (bases or {}).get(name, name))
    image = await DebianBases(store).image(name)
    if image is None:
        raise TemplateError("no such image", field="image", received=name, fix="name it in images.bases")
    return finished(image, image.name)
