"""Content-addressed layers, each extracted once and shared read-only by all sandboxes.

    ROOT/layers/<hex>/root         the layer's files: a lower layer for overlayfs with `userxattr`
    ROOT/layers/<hex>/layer.json   whose it is, written last
    ROOT/tmp/                      layers in the making, each locked by the process that makes it

A layer appears by a rename, whole or not at all. What a killed process left in `tmp` goes when the store is
opened next. Any number of processes may share a store.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from etude.errors import ResourceError
from etude.kit.durable import DRAFTS, publish_directory, sync_file_system, write_json
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.archives import DigestReader, Readable, decompressed, open_archive
from etude.sandbox.images.extract import Extractor, give, storage_error
from etude.sandbox.inside.packing import pack_tree
from etude.sandbox.inside.rights import NOBODY

MAX_LAYER_BYTES = 8 << 30
MAX_LAYER_ENTRIES = 1_000_000
_VERSION = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


def default_owner() -> tuple[int, int]:
    """Who owns all files of all layers: the one user that sandboxes map."""
    return (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


class LayerStore:
    """Layers below the directory `root`. All methods block; call them in a thread.

    Raises TemplateError for a layer that is missing, damaged or foreign, and for archives that are;
    ResourceError for what the machine lacks.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.owner = default_owner()
        """Who owns every file (uid, gid)."""
        self._layers = root / "layers"
        self._temporary = root / "tmp"
        try:
            for folder in (self._layers, self._temporary):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"the layer store cannot be made: {error.strerror}",
                field="layer store",
                received=str(root),
                fix="name a directory that you may write to",
            ) from error
        sweep(self._temporary)
        sweep(self._layers, DRAFTS)

    def add_tar(
        self,
        stream: Readable,
        expected: str | None = None,
        limit_bytes: int = MAX_LAYER_BYTES,
        max_entries: int = MAX_LAYER_ENTRIES,
        name: str = "layer",
    ) -> str:
        """Extracts an archive (plain, gzip or zstd) into a layer and returns the layer's digest.

        `limit_bytes` bounds the uncompressed archive. Nothing is kept of an archive that is damaged,
        hostile, too large, or whose digest is not `expected`. `name` stands in errors.
        """
        reader = DigestReader(decompressed(stream), name, limit_bytes)
        with self.scratch() as folder:
            files = folder / "layer" / "root"
            files.mkdir(parents=True)
            files.chmod(0o755)
            give(os.fsencode(files), self.owner)
            with open_archive(reader, name) as archive:
                Extractor(files, self.owner, max_entries, name).run(archive)
            reader.drain()
            reader.check(expected)
            if not self.has(reader.digest):
                self._publish(folder / "layer", reader.digest)
        return reader.digest

    def has(self, digest: str) -> bool:
        """Whether the layer is here, and its record whole."""
        try:
            self.path(digest)
        except TemplateError:
            return False
        return True

    def path(self, digest: str) -> Path:
        """The directory to mount as a lower layer. Raises TemplateError if the layer is missing, torn or of
        another owner."""
        folder = self._folder(digest)
        try:
            record = json.loads((folder / "layer.json").read_bytes())
            version, owner = record["version"], tuple(record["owner"])
        except FileNotFoundError as error:
            raise TemplateError(
                "no such layer in the store",
                field="layer",
                received=digest,
                fix="build or import the image again",
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(digest, "its record does not parse") from error
        if version != _VERSION or owner != self.owner:
            raise _damaged(digest, f"it was made for owner {owner}, version {version}")
        return folder / "root"

    def export_tar(self, digest: str, target: BinaryIO) -> None:
        """Writes the layer as a plain OCI archive, sorted: equal layers give equal bytes, which need not be
        those that it came from. Raises TemplateError as `path`, OSError."""
        pack_tree(str(self.path(digest)), target, max_hole_bytes=None)

    def scratch(self) -> AbstractContextManager[Path]:
        """A temporary directory on the store's file system; goes with the block, or with this process."""
        return ScratchDirectory(self._temporary)

    def _publish(self, folder: Path, digest: str) -> None:
        write_json(folder / "layer.json", {"version": _VERSION, "owner": self.owner})
        try:
            sync_file_system(folder)
            publish_directory(folder, self._folder(digest), keep=lambda: self.has(digest))
        except OSError as error:
            raise storage_error(error, "layer store", digest) from error

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise TemplateError(
                "is no layer digest", field="layer", received=digest, fix="sha256:<64 hex digits>"
            )
        return self._layers / digest.removeprefix("sha256:")


def _damaged(digest: str, reason: str) -> TemplateError:
    return TemplateError(
        f"the layer is damaged: {reason}", field="layer", received=digest,
        fix="remove the layer and build or import the image again",
    )  # fmt: skip
