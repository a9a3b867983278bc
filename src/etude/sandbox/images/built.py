"""What was built before is not built again: an image by all that it is made of.

Dockerfile, context, arguments, bases as they are by now ──digest──> layers in the store
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
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


def find_mark(name: str, bases: Mapping[str, str], store: ImageStore) -> str | None:
    """What the image is by now that FROM calls so; None: there is none yet."""
    try:
        file = BaseFile.find(bases.get(name))
        if file is not None:
            return file.mark()
        image = find_stored(bases.get(name, name), store)
        return None if image is None else image.digest
    except TemplateError:
        return None


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What all builds of a set have in common."""

    bases: Mapping[str, str] = field(default_factory=dict)
    """What FROM and COPY --from name -> where that lies: `oci:DIRECTORY[:TAG]`, `oci-archive:FILE`,
    `docker-archive:FILE`, or the name of an image of the store."""
    network: Network = NO_NETWORK
    """What RUN may reach, through the egress proxy."""
    allow_private: tuple[str, ...] = ()
    """Exact `IP:port` that it may reach although they are private."""
    volumes: Mapping[str, Path] = field(default_factory=dict)
    """Path inside -> file or directory of the host, shown to RUN read-only and part of no layer:
    certificates, settings of package managers."""
    deadline_s: float = DEADLINE_S
    """For one build. What it takes to make or give it bases does not count."""
    fresh: bool = False
    """Whether every instruction runs again."""


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """What one image is built of."""

    context: Path
    dockerfile: str
    args: Mapping[str, str]
    target: str | None
    options: BuildOptions

    def find_key(self, store: ImageStore) -> str | None:
        """Digest of all of it, as far as buildah too would build again for a change; None where a base is
        named by an argument. Raises OSError."""
        text = (self.context / self.dockerfile).read_text(encoding="utf-8", errors="replace")
        names = sorted({name for found in _NAMES.finditer(text) for name in found.groups() if name})
        if any("$" in name for name in names):
            return None
        options = self.options
        about = {
            "asked": [self.dockerfile, dict(self.args), self.target],
            "bases": {name: find_mark(name, options.bases, store) for name in names},
            "network": [options.network.allow, options.allow_private],
            "volumes": {path: str(source) for path, source in options.volumes.items()},
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        for row in _describe(self.context):
            digest.update(row)
        return digest.hexdigest()


def _describe(root: Path) -> Iterator[bytes]:
    """Names, modes and contents of all that lies below a directory."""
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


def recall_build(store: ImageStore, key: str, name: str) -> Image | None:
    """The image that was noted under a key, saved under a name; None if there is none, or a layer is gone."""
    record = store.recall(key)
    if record is None:
        return None
    image = decode_image({**record, "name": name})
    if not all(map(store.layers.has, image.layers)):
        return None
    store.save(image)
    return image


def note_build(store: ImageStore, key: str, image: Image) -> None:
    """Has `recall_build` find an image under a key."""
    store.note(key, asdict(image))
