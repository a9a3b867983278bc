"""Where images come from that FROM names, and `docker_image` of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.bases import DebianBases
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import import_image
from etude.sandbox.images.stage import finished
from etude.sandbox.template import Image

_ARCHIVES = ("oci", "oci-archive", "docker-archive")


async def find_base(name: str, store: ImageStore, bases: Mapping[str, str] | None = None) -> Image:
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
