"""Base images made on this machine: Debian by `mmdebstrap`, from the package sources that the host uses.

Built when first asked for, into one layer. A base is reproducible as far as its sources stand still: times
are fixed, caches, logs and identities are left out.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.images.debootstrap import BUILD_TIMEOUT_S, write_archive
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EPOCH_S = 946684800
"""Time of all files: 2000-01-01. Not 1970, because zip archives (and so Python wheels) begin at 1980."""
_SLIM = tuple(f"path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man"))
_CLEANING = (
    'find "$1"/var/lib/apt/lists "$1"/var/cache/apt "$1"/var/cache/ldconfig "$1"/var/log -type f -delete',
    'rm -rf "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old "$1"/root/.cache',
    ': >"$1"/etc/machine-id; echo sandbox >"$1"/etc/hostname; : >"$1"/etc/resolv.conf',
)
# Debian's pip refuses to install beside apt; in a sandbox that protects nobody.
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
"""What FROM may name without anybody having imported it."""


class DebianBases:
    """Makes the images of `bases` in a store, each once."""

    def __init__(
        self,
        store: ImageStore,
        bases: dict[str, Base] | None = None,
        timeout_s: float = BUILD_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._bases = BASES if bases is None else bases
        self._timeout_s = timeout_s
        self._building = asyncio.Lock()

    def names(self) -> list[str]:
        """What can be made, sorted."""
        return sorted(self._bases)

    async def image(self, name: str) -> Image | None:
        """The base image, made now (minutes) unless the store has it; None for a name it does not know.

        Raises ResourceError if mmdebstrap is missing or its sources cannot be reached, TemplateError for a
        damaged image.
        """
        base = self._bases.get(name)
        if base is None:
            return None
        async with self._building:
            if await asyncio.to_thread(self._store.has, name):
                return await asyncio.to_thread(self._store.load, name)
            digest = await self.make_layer(base)
            image = Image(name, (digest,), {"PATH": DEFAULT_PATH}, workdir="/")
            await asyncio.to_thread(self._store.save, image)
            return image

    async def make_layer(self, base: Base) -> str:
        """Makes a base's layer, whether the store has it or not. Raises as `image`."""
        with self._store.layers.scratch() as folder:
            target = folder / "base.tar"
            await write_archive(base.suite, target, _options(base), EPOCH_S, timeout_s=self._timeout_s)
            return await asyncio.to_thread(self._import, target)

    def _import(self, path: Path) -> str:
        with path.open("rb") as file:
            return self._store.layers.add_tar(file, name="base image")


def _options(base: Base) -> list[str]:
    options = ["--variant=minbase"]
    if base.packages:
        options.append(f"--include={','.join(base.packages)}")
    if base.slim:
        options += [f"--dpkgopt={option}" for option in _SLIM]
    return options + [f"--customize-hook={hook}" for hook in (*base.hooks, *_CLEANING)]
