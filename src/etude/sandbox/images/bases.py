"""Base images made on this machine: Debian by `mmdebstrap`, from the package sources that the host uses.

Built when first asked for, into one layer. A base is reproducible as far as its sources stand still: times
are fixed, caches, logs and identities are left out. Nothing here names a mirror: they come from the host's
apt configuration, and where that has none for the suite, from mmdebstrap's own defaults.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from etude.errors import ResourceError, SandboxError
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image

BUILD_TIMEOUT_S = 900.0
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EPOCH_S = 946684800
"""Time of all files: 2000-01-01. Not 1970, because zip archives (and so Python wheels) begin at 1980."""
_TAIL_CHARS = 1500
# What sources.list says; CODENAME would need package lists that were fetched, and are not being replaced.
_REPOSITORY_FORMAT = "$(RELEASE)|$(COMPONENT)|$(REPO_URI)"
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
HOST = "host"
"""The host's own programs: a template without an image."""


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
        tool = shutil.which("mmdebstrap")
        if tool is None:
            raise ResourceError(
                "mmdebstrap is not installed", field="base image", received=base.suite,
                fix="apt-get install mmdebstrap, or import an OCI archive of the base image",
            )  # fmt: skip
        sources = await asyncio.to_thread(_host_sources, base.suite)
        with self._store.layers.scratch() as folder:
            target = folder / "base.tar"
            # Packages are unpacked by other users, too, where mmdebstrap does not run as root.
            folder.chmod(0o711)
            await self._run([tool, *_arguments(base, target, bool(sources))], sources, folder)
            return await asyncio.to_thread(self._import, target)

    def _import(self, path: Path) -> str:
        with path.open("rb") as file:
            return self._store.layers.add_tar(file, name="base image")

    async def _run(self, argv: list[str], sources: str, folder: Path) -> None:
        environment = {
            **os.environ,
            "SOURCE_DATE_EPOCH": str(EPOCH_S),
            "TMPDIR": str(folder),
            "LC_ALL": "C.UTF-8",
        }
        with (folder / "log").open("w+b") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    await process.communicate(sources.encode())
            except TimeoutError as error:
                raise ResourceError(
                    f"mmdebstrap took longer than {self._timeout_s:g} s", field="base image",
                    fix="look at the network and the mirror, or allow more time",
                ) from error  # fmt: skip
            finally:
                await _end(process)
            if process.returncode != 0:
                log.seek(0)
                tail = log.read().decode(errors="replace")[-_TAIL_CHARS:]
                raise ResourceError(
                    f"mmdebstrap ended with exit code {process.returncode}: {tail.strip()}",
                    field="base image",
                    fix="see that apt-get update works here; as a plain user, install uidmap",
                )


def _arguments(base: Base, target: Path, has_sources: bool) -> list[str]:
    arguments = ["--variant=minbase", "--format=tar", "--quiet"]
    if base.packages:
        arguments.append(f"--include={','.join(base.packages)}")
    if base.slim:
        arguments += [f"--dpkgopt={option}" for option in _SLIM]
    arguments += [f"--customize-hook={hook}" for hook in (*base.hooks, *_CLEANING)]
    return [*arguments, base.suite, str(target), *(["-"] if has_sources else [])]


def _host_sources(suite: str) -> str:
    """The host's own package sources for a suite with its updates, as lines of sources.list; may be empty."""
    try:
        found = subprocess.run(
            ["apt-get", "indextargets", "--format", _REPOSITORY_FORMAT, "Created-By: Packages"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired as error:
        raise SandboxError("apt-get does not answer", field="base image") from error
    if found.returncode != 0:
        raise ResourceError(
            f"apt does not say what its sources are: {found.stderr.strip()[-_TAIL_CHARS:]}",
            field="base image",
            fix="see that apt-get update works here",
        )
    return parse_sources(found.stdout, suite)


def parse_sources(listing: str, suite: str) -> str:
    """Lines of sources.list from `release|component|address` rows: the suite, its updates, its fixes.

    Empty if the suite itself is not among them. Raises TemplateError for addresses that hold a password.
    """
    lines: set[str] = set()
    for row in listing.splitlines():
        release, component, address = (*row.split("|"), "", "")[:3]
        if release not in (suite, f"{suite}-updates", f"{suite}-security") or component != "main":
            continue
        if "@" in address:
            raise TemplateError(
                "the host's package source holds a password, which would end up in the image",
                field="base image",
                received=release,
                fix="keep passwords in apt's auth.conf",
            )
        lines.add(f"deb {address} {release} main\n")
    return "".join(sorted(lines)) if any(f" {suite} main" in line for line in lines) else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends mmdebstrap and all that it started, if it runs still."""
    if process.returncode is not None:
        return
    # It unmounts and tidies up when it is asked to end.
    for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await process.wait()
            return
