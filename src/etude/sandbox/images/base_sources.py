"""Resolves the base images that FROM names: from configured files, the store, or Debian packages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.debootstrap import BUILD_TIMEOUT_S, write_archive
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import import_image
from etude.sandbox.template import Image

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EPOCH_S = 946684800
"""Time of all files: 2000-01-01. Not 1970, because zip archives (and so Python wheels) begin at 1980."""
_NUM_NAMED = 12
"""Most images of the store that an error lists."""
_TASKS = ("harbor/", "beginning/", "made/")
"""Prefixes of images that were built for tasks, which no FROM refers to."""
_SLIM = tuple(f"path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man"))
_CLEANING = (
    'find "$1"/var/lib/apt/lists "$1"/var/cache/apt "$1"/var/cache/ldconfig "$1"/var/log -type f -delete',
    'rm -rf "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old "$1"/root/.cache',
    ': >"$1"/etc/machine-id; echo sandbox >"$1"/etc/hostname; : >"$1"/etc/resolv.conf',
)
# Debian's pip refuses to install outside of apt; in a sandbox that has no use.
_FREE_PIP = ('rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',)
_PYTHON = ("ca-certificates", "python-is-python3", "python3", "python3-pip", "python3-pytest", "python3-venv")
_TOOLS = ("build-essential", "ca-certificates", "curl", "git")


@dataclass(frozen=True, slots=True)
class Base:
    """How one base image is made."""

    suite: str
    packages: tuple[str, ...] = ()
    slim: bool = True
    """Without documentation."""
    hooks: tuple[str, ...] = ()


_DEBIAN, _DEBIAN_SLIM = Base("bookworm", ("ca-certificates",), slim=False), Base("bookworm")
_PYTHON_SLIM = Base("bookworm", _PYTHON, hooks=_FREE_PIP)
"""Debian's own Python 3.11 with pip and pytest from Debian, not the one of python.org."""
_PYTHON_FULL = Base("bookworm", tuple(sorted({*_PYTHON, *_TOOLS, "python3-dev"})), False, _FREE_PIP)
BASES = {
    "debian:12": _DEBIAN,
    "debian:12-slim": _DEBIAN_SLIM,
    "debian:bookworm": _DEBIAN,
    "debian:bookworm-slim": _DEBIAN_SLIM,
    "python:3.11": _PYTHON_FULL,
    "python:3.11-bookworm": _PYTHON_FULL,
    "python:3.11-slim": _PYTHON_SLIM,
    "python:3.11-slim-bookworm": _PYTHON_SLIM,
}
"""The base images that FROM may name without an import."""


async def make_base(name: str, store: ImageStore, timeout_s: float = BUILD_TIMEOUT_S) -> Image:
    """Builds one of `BASES` from Debian packages (takes minutes) and saves it in the store.

    Raises ResourceError if mmdebstrap is missing or its package sources cannot be reached.
    """
    base = BASES[name]

    def save(archive: Path) -> Image:
        with archive.open("rb") as file:
            digest = store.layers.add_tar(file, name="base image")
        image = Image(name, (digest,), {"PATH": DEFAULT_PATH}, workdir="/")
        store.save(image)
        return image

    with store.layers.scratch() as folder:
        target = folder / "base.tar"
        await write_archive(base.suite, target, _options(base), EPOCH_S, timeout_s)
        return await asyncio.to_thread(save, target)


def _options(base: Base) -> list[str]:
    options = ["--variant=minbase"]
    if base.packages:
        options.append(f"--include={','.join(base.packages)}")
    if base.slim:
        options += [f"--dpkgopt={option}" for option in _SLIM]
    return options + [f"--customize-hook={hook}" for hook in (*base.hooks, *_CLEANING)]


TRANSPORTS = ("oci", "oci-archive", "docker-archive")
"""The file transports of buildah and skopeo."""


@dataclass(frozen=True, slots=True)
class BaseFile:
    """An image file outside the store."""

    transport: str
    path: Path
    tag: str
    """Selects one of several images; empty if there is only one."""

    @classmethod
    def find(cls, text: str | None) -> BaseFile | None:
        """Parses `oci:DIRECTORY[:TAG]`, `oci-archive:FILE[:TAG]` or `docker-archive:FILE[:TAG]`; None for any
        other text. Raises TemplateError if the file does not exist."""
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
                fix="name an existing image: oci:DIRECTORY, oci-archive:FILE or docker-archive:FILE",
            )  # fmt: skip
        return cls(transport, path, tag)

    def fingerprint(self) -> str:
        """Path, size and modification time, which differ once the file has changed."""
        status = (self.path / "index.json" if self.path.is_dir() else self.path).stat()
        return f"{self.transport}:{self.path.resolve()}:{self.tag} {status.st_size} {status.st_mtime_ns}"


async def find_base(name: str, store: ImageStore, bases: Mapping[str, str] | None = None) -> Image:
    """The image that `FROM name` means, imported or built into the store if needed.

    `bases`: as `BuildOptions.bases`. Raises TemplateError if it is not available.
    """
    source = (bases or {}).get(name)
    file = BaseFile.find(source)
    if file is None:
        return await find_in_store(source or name, store)
    return await asyncio.to_thread(import_image, file.path, store, name, file.tag or None)


async def find_in_store(name: str, store: ImageStore) -> Image:
    """An image of the store; if it is one of `BASES` and missing, it is built first.

    Raises TemplateError if there is no such image, ResourceError if it cannot be built.
    """
    found = await asyncio.to_thread(find_stored, name, store)
    if found is not None:
        return found
    for candidate in _candidates(name):
        if candidate in BASES:
            return await make_base(candidate, store)
    names = await asyncio.to_thread(store.list)
    stored = [entry for entry in names if entry not in BASES and not entry.startswith(_TASKS)]
    rest = [f"{len(stored) - _NUM_NAMED} more of the store"] if len(stored) > _NUM_NAMED else []
    known = ", ".join([*stored[:_NUM_NAMED], *rest, *sorted(BASES)])
    raise TemplateError(
        "no such base image", field="images.bases", received=name,
        fix=f"use one of {known}; or save it with another tool and import it under this name, "
        "or give its location (oci:DIRECTORY)",
    )  # fmt: skip


def find_stored(name: str, store: ImageStore) -> Image | None:
    """The image if the store has it; else None. Raises TemplateError for a damaged one."""
    return next((store.load(candidate) for candidate in _candidates(name) if store.has(candidate)), None)


def full_name(name: str) -> str:
    """Docker's full form of a name: `python:3.11` is `docker.io/library/python:3.11`."""
    host, slash, _ = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    return name if "." in host or ":" in host or host == "localhost" else f"docker.io/{name}"


def _candidates(name: str) -> list[str]:
    """The names under which the image that FROM names may be stored."""
    short = name.removeprefix("docker.io/").removeprefix("library/")
    names = [name, short]
    names += [] if ":" in short or "@" in short else [f"{short}:latest"]
    return list(dict.fromkeys(names))
