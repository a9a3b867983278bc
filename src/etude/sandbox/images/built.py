"""A cache of builds, keyed by a digest of all inputs; and final COPY instructions that need no build.

    Dockerfile, context, arguments, current base images ──digest──> layers in the store

A Dockerfile that ends with a copy of a directory into the working directory, as those of most tasks do:

    FROM ... RUN ...          built by buildah once, for all tasks with the same beginning
    COPY workspace/ /app/     written as a layer here, which is fast"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import BaseFile, find_stored
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image, decode_image
from etude.sandbox.types import NO_NETWORK, Network

DEADLINE_S = 1800.0
_NAMES = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)|--from=(\S+)", re.MULTILINE | re.IGNORECASE)


def find_fingerprint(name: str, bases: Mapping[str, str], store: ImageStore) -> str | None:
    """The current fingerprint of the image that FROM names; None: there is none yet."""
    try:
        file = BaseFile.find(bases.get(name))
        if file is not None:
            return file.fingerprint()
        image = find_stored(bases.get(name, name), store)
        return None if image is None else image.digest
    except TemplateError:
        return None


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options common to all builds of a set."""

    bases: Mapping[str, str] = field(default_factory=dict)
    """Image that FROM and COPY --from name -> its source: `oci:DIRECTORY[:TAG]`, `oci-archive:FILE`,
    `docker-archive:FILE`, or the name of an image of the store."""
    network: Network = NO_NETWORK
    """What RUN may reach, through the egress proxy."""
    allow_private: tuple[str, ...] = ()
    """Private addresses that RUN may reach, each an exact `IP:port`."""
    volumes: Mapping[str, Path] = field(default_factory=dict)
    """Path inside -> file or directory of the host, shown to RUN read-only and part of no layer:
    certificates, settings of package managers."""
    deadline_s: float = DEADLINE_S
    """Time limit of one build, not counting the time to build or supply base images."""
    fresh: bool = False
    """Whether to run every instruction again, without the cache."""


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """The inputs of one image build."""

    context: Path
    dockerfile: str
    args: Mapping[str, str]
    target: str | None
    options: BuildOptions

    def find_key(self, store: ImageStore) -> str | None:
        """Digest of everything for which buildah, too, would build again if it changes; None if a base image
        is named by an argument. Raises OSError."""
        text = (self.context / self.dockerfile).read_text(encoding="utf-8", errors="replace")
        names = sorted({name for found in _NAMES.finditer(text) for name in found.groups() if name})
        if any("$" in name for name in names):
            return None
        options = self.options
        about = {
            "asked": [self.dockerfile, dict(self.args), self.target],
            "bases": {name: find_fingerprint(name, options.bases, store) for name in names},
            "network": [options.network.allow, options.allow_private],
            "volumes": {path: str(source) for path, source in options.volumes.items()},
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for row in _describe(self.context):
            digest.update(row)
        return digest.hexdigest()


def _describe(root: Path) -> Iterator[bytes]:
    """Paths, modes and contents of everything below a directory."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        for place in sorted(Path(folder, name) for name in (*folders, *files)):
            mode = place.lstat().st_mode
            yield os.fsencode(f"{place.relative_to(root)}\0{mode}\0")
            if stat.S_ISLNK(mode):
                yield os.fsencode(f"{place.readlink()}\0")
            elif stat.S_ISREG(mode):
                with place.open("rb") as file:
                    yield hashlib.file_digest(file, "sha256").digest()


def find_build(store: ImageStore, key: str, name: str) -> Image | None:
    """The image recorded under a key, saved under `name`; None if there is none or a layer is missing."""
    record = store.read_cache(key)
    if record is None:
        return None
    image = decode_image({**record, "name": name})
    if not all(map(store.layers.has, image.layers)):
        return None
    store.save(image)
    return image


def record_build(store: ImageStore, key: str, image: Image) -> None:
    """Records an image under a key, for `find_build`."""
    store.write_cache(key, asdict(image))


_COPY = re.compile(r"COPY (?P<source>\w[\w.-]*)/ (?P<target>/\w[\w.-]*)/?")
_NEEDS_CONTEXT = re.compile(
    r"^\s*(COPY\s+(?!--from=)|ADD\s)|--mount|<<|escape=", re.MULTILINE | re.IGNORECASE
)
_MODE = 0o755


@dataclass(frozen=True, slots=True)
class LastCopy:
    """A final COPY of a directory in a Dockerfile."""

    beginning: str
    """The instructions before it, which do not use the context."""
    source: Path
    target: str
    """Absolute path with one component."""

    @classmethod
    def find(cls, context: Path, dockerfile: str) -> LastCopy | None:
        """Parses a Dockerfile; None if it ends differently, or if the directory has anything but files, links
        and directories."""
        text = (context / dockerfile).read_text(encoding="utf-8", errors="surrogateescape")
        beginning, _, last = text.rstrip("\n").rpartition("\n")
        found = _COPY.fullmatch(last)
        if found is None or _NEEDS_CONTEXT.search(beginning) or beginning.endswith("\\"):
            return None
        source = context / found["source"]
        is_filtered = any(context.glob("*.dockerignore")) or (context / ".dockerignore").exists()
        if is_filtered or source.is_symlink() or not source.is_dir() or not _is_plain(source):
            return None
        return cls(f"{beginning}\n", source, found["target"])

    def add_to(self, image: Image, name: str, store: ImageStore) -> Image | None:
        """Adds the directory as a layer to the image of `beginning`, and saves it under `name`. None if the
        target is not the image's working directory, or not a directory. Blocks."""
        if image.workdir != self.target:
            return None
        places = [store.layers.path(layer) / self.target.removeprefix("/") for layer in image.layers]
        modes = [place.lstat().st_mode for place in places if os.path.lexists(place)]
        mode = modes[-1] if modes else stat.S_IFDIR | _MODE
        if not stat.S_ISDIR(mode):
            return None
        with store.layers.scratch() as folder:
            with tarfile.open(folder / "layer.tar", "w", format=tarfile.PAX_FORMAT) as archive:
                self._pack(archive, stat.S_IMODE(mode))
            with (folder / "layer.tar").open("rb") as file:
                layer = store.layers.add_tar(file, name=name)
        made = Image(name, (*image.layers, layer), image.env, image.workdir, image.user)
        store.save(made)
        return made

    def _pack(self, archive: tarfile.TarFile, mode: int) -> None:
        top = self.target.removeprefix("/")

        def of_root(row: tarfile.TarInfo) -> tarfile.TarInfo:
            row.uid = row.gid = 0
            row.uname = row.gname = ""
            if row.name == top:
                row.mode = mode
            return row

        archive.add(self.source, top, filter=of_root)


def _is_plain(root: Path) -> bool:
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            mode = Path(folder, name).lstat().st_mode
            if name.startswith(".wh.") or not any(
                kind(mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
            ):
                return False
    return True
