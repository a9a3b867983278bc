"""Where the image lies that FROM names: a file that a map gives, the store, or Debian's packages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.bases import BASES, DebianBases
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import import_image
from etude.sandbox.template import Image

TRANSPORTS = ("oci", "oci-archive", "docker-archive")
"""Of files, in the words of buildah and skopeo."""


@dataclass(frozen=True, slots=True)
class BaseFile:
    """An image outside the store."""

    transport: str
    path: Path
    tag: str
    """Which of several; empty where there is one."""

    @classmethod
    def find(cls, text: str | None) -> BaseFile | None:
        """Reads `oci:DIRECTORY[:TAG]`, `oci-archive:FILE[:TAG]` or `docker-archive:FILE[:TAG]`; None for what
        names no file. Raises TemplateError for what is not there."""
        transport, _, rest = (text or "").partition(":")
        if transport not in TRANSPORTS or not rest:
            return None
        path, tag = Path(rest), ""
        if not path.exists() and ":" in rest:
            head, _, tag = rest.rpartition(":")
            path = Path(head)
        if not path.exists() or path.is_dir() != (transport == "oci"):
            raise TemplateError(
                "no such image", field="images.bases", received=text,
                fix="an image that is there: oci:DIRECTORY, oci-archive:FILE or docker-archive:FILE",
            )  # fmt: skip
        return cls(transport, path, tag)

    def mark(self) -> str:
        """Another one when the file has changed."""
        status = (self.path / "index.json" if self.path.is_dir() else self.path).stat()
        return f"{self.transport}:{self.path.resolve()}:{self.tag} {status.st_size} {status.st_mtime_ns}"


async def find_base(name: str, store: ImageStore, bases: Mapping[str, str] | None = None) -> Image:
    """The image that FROM `name` starts with, in the store: imported or made now if it must be.

    `bases`: as `BuildOptions.bases`. Raises TemplateError if it cannot be had.
    """
    source = (bases or {}).get(name)
    file = BaseFile.find(source)
    if file is None:
        return await find_in_store(source or name, store)
    return await asyncio.to_thread(import_image, file.path, store, name, file.tag or None)


async def find_in_store(name: str, store: ImageStore) -> Image:
    """An image of the store, made of Debian's packages if it is one of those and not there yet.

    Raises TemplateError if there is none, ResourceError if it cannot be made.
    """
    stored = await asyncio.to_thread(find_stored, name, store)
    if stored is not None:
        return stored
    debian = DebianBases(store)
    for candidate in _candidates(name):
        image = await debian.image(candidate)
        if image is not None:
            return image
    known = sorted({*await asyncio.to_thread(store.list), *BASES})
    raise TemplateError(
        "no such base image", field="images.bases", received=name,
        fix=f"known: {', '.join(known)}; save another one with another tool, and import it under this name "
        "or give its place (oci:DIRECTORY)",
    )  # fmt: skip


def find_stored(name: str, store: ImageStore) -> Image | None:
    """The image if the store has it now. Raises TemplateError for a damaged one."""
    return next((store.load(candidate) for candidate in _candidates(name) if store.has(candidate)), None)


def full_name(name: str) -> str:
    """What Docker takes a name for: `python:3.11` is `docker.io/library/python:3.11`."""
    host, slash, _ = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    return name if "." in host or ":" in host or host == "localhost" else f"docker.io/{name}"


def _candidates(name: str) -> list[str]:
    """What an image may be called that FROM names so."""
    short = name.removeprefix("docker.io/").removeprefix("library/")
    names = [name, short]
    names += [] if ":" in short or "@" in short else [f"{short}:latest"]
    return list(dict.fromkeys(names))
