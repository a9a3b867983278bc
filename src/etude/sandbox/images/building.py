"""Images built from Dockerfiles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import find_base
from etude.sandbox.images.bases import DebianBases
from etude.sandbox.images.builder import Builder
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.runner import SandboxRunner
from etude.sandbox.template import Image


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
        await find_base(base, store, options.bases)
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
