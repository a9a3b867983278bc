"""A Dockerfile that ends with a copy of a directory into the working directory, as most tasks' do.

FROM ... RUN ...          built by buildah once, for all tasks that begin alike
COPY workspace/ /app/     a layer that is written here, in a moment
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image

_COPY = re.compile(r"COPY (?P<source>\w[\w.-]*)/ (?P<target>/\w[\w.-]*)/?")
_NEEDS_CONTEXT = re.compile(
    r"^\s*(COPY\s+(?!--from=)|ADD\s)|--mount|<<|escape=", re.MULTILINE | re.IGNORECASE
)
_MODE = 0o755


@dataclass(frozen=True, slots=True)
class LastCopy:
    """The end of a Dockerfile."""

    beginning: str
    """What stands before, which needs nothing of the context."""
    source: Path
    target: str
    """Absolute, of one part."""

    @classmethod
    def find(cls, context: Path, dockerfile: str) -> LastCopy | None:
        """None for a Dockerfile that ends otherwise, or a directory with anything but files, links and
        directories."""
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
        """The image that `beginning` gave with the directory on top, saved under `name`. None where the
        target is not its working directory, or is no directory there. Blocks."""
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
