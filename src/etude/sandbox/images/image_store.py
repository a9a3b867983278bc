"""Stores content-addressed layers, each extracted once and shared read-only by all sandboxes, and named
images: the layers of a root file system, and how programs run in it.

    ROOT/layers/<hex>/root           a layer's files: a lower layer for overlayfs with `userxattr`
    ROOT/layers/<hex>/layer.json     its owner, written last
    ROOT/tmp/                        unfinished layers, each locked by the process that makes it
    ROOT/images/<quoted name>.json   written atomically, with the image's digest
    ROOT/cache/<id>.json             layers of an image built by buildah, and the layer of an exported archive
    ROOT/buildah/                    see `buildah`

A layer appears by a rename, whole or not at all. Files of killed processes in `tmp` are removed when the
store is opened next. Any number of processes may share a store."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from etude.errors import ResourceError
from etude.kit.durable import DRAFTS, publish_directory, read_record, sync_file_system, write_json
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.archives import DigestReader, Readable, decompressed, open_archive
from etude.sandbox.images.extract import Extractor, set_owner, storage_error
from etude.sandbox.inside.packing import pack_tree
from etude.sandbox.inside.rights import NOBODY
from etude.sandbox.template import Image, decode_image

MAX_LAYER_BYTES = 8 << 30
MAX_LAYER_ENTRIES = 1_000_000
_VERSION = 1
"""Version of the records of layers and of images."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


def default_owner() -> tuple[int, int]:
    """(uid, gid) of all files of all layers: the one user that sandboxes map."""
    return (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


class LayerStore:
    """Layers below the directory `root`. All methods block; call them in a thread.

    Raises TemplateError for a layer or archive that is missing, damaged or foreign; ResourceError for missing
    capabilities of the machine.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.owner = default_owner()
        """(uid, gid) of every file."""
        self._layers = root / "layers"
        self._temporary = root / "tmp"
        try:
            for folder in (self._layers, self._temporary):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"the layer store cannot be created: {error.strerror}",
                field="layer store",
                received=str(root),
                fix="name a directory that you can write to",
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

        `limit_bytes` limits the uncompressed archive. An archive that is damaged, hostile, too large, or
        whose digest is not `expected` leaves nothing behind. `name`: the field of errors.
        """
        reader = DigestReader(decompressed(stream), name, limit_bytes)
        with self.scratch() as folder:
            files = folder / "layer" / "root"
            files.mkdir(parents=True)
            files.chmod(0o755)
            set_owner(os.fsencode(files), self.owner)
            with open_archive(reader, name) as archive:
                Extractor(files, self.owner, max_entries, name).run(archive)
            reader.drain()
            reader.check(expected)
            if not self.has(reader.digest):
                self._publish(folder / "layer", reader.digest)
        return reader.digest

    def has(self, digest: str) -> bool:
        """Whether the store has the layer, with a valid record."""
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
            raise _damaged_layer(digest, "its record does not parse") from error
        if version != _VERSION or owner != self.owner:
            raise _damaged_layer(digest, f"it was made for owner {owner}, version {version}")
        return folder / "root"

    def export_tar(self, digest: str, target: BinaryIO) -> None:
        """Writes the layer as a plain, sorted OCI archive: equal layers give equal bytes, which may differ
        from the imported archive. Raises TemplateError as `path`, OSError."""
        pack_tree(str(self.path(digest)), target, max_hole_bytes=None)

    def scratch(self) -> AbstractContextManager[Path]:
        """A temporary directory on the store's file system; removed with the block, or with this process."""
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
                "is not a layer digest", field="layer", received=digest, fix="write sha256:<64 hex digits>"
            )
        return self._layers / digest.removeprefix("sha256:")


def _damaged_layer(digest: str, reason: str) -> TemplateError:
    return TemplateError(
        f"the layer is damaged: {reason}", field="layer", received=digest,
        fix="remove the layer and build or import the image again",
    )  # fmt: skip


_MAX_NAME_BYTES = 200
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*)?"
_NAME = re.compile(rf"{_PART}(/{_PART})*(@sha256:[0-9a-f]{{64}})?")
_KEY = re.compile(r"[0-9a-f]{64}\Z")


class ImageStore:
    """Named images over a store of layers. All methods block; call them in a thread."""

    def __init__(self, root: Path) -> None:
        self.layers = LayerStore(root)
        """The layers of all images."""
        self._images = root / "images"
        self._cache = root / "cache"
        for folder in (self._images, self._cache):
            folder.mkdir(exist_ok=True)

    def save(self, image: Image) -> None:
        """Saves an image under its name; replaces another image of that name.

        Raises TemplateError if a layer is missing, or as `check_name`.
        """
        for digest in image.layers:
            self.layers.path(digest)
        record = {"version": _VERSION, **dataclasses.asdict(image), "digest": image.digest}
        write_json(self._file(image.name), record)

    def load(self, name: str) -> Image:
        """The image of that name. Raises TemplateError if it, or a layer of it, is missing or damaged."""
        try:
            data = self._file(name).read_bytes()
        except FileNotFoundError as error:
            raise TemplateError(
                "no such image", field="image", received=name,
                fix=f"build or import it; known: {', '.join(self.list()) or 'none'}",
            ) from error  # fmt: skip
        image = _parse(data, name)
        for digest in image.layers:
            self.layers.path(digest)
        return image

    def has(self, name: str) -> bool:
        """Whether an image of that name is stored; it may be damaged."""
        return self._file(name).exists()

    def list(self) -> list[str]:
        """Names of all images, sorted."""
        return sorted(urllib.parse.unquote(path.stem) for path in self._images.glob("[!.]*.json"))

    def remove(self, name: str) -> None:
        """Removes a name; the layers stay. Raises TemplateError if there is no such image."""
        try:
            self._file(name).unlink()
        except FileNotFoundError as error:
            raise TemplateError("no such image", field="image", received=name) from error

    def read_cache(self, key: str) -> dict[str, Any] | None:
        """The record of `write_cache` under `key` (64 hex digits); None if there is none or it is damaged."""
        assert _KEY.match(key), key
        return read_record(self._cache / f"{key}.json") or None  # a damaged record only costs a rebuild

    def write_cache(self, key: str, record: Mapping[str, Any]) -> None:
        """Records the import of an image that buildah built, or of an exported layer, under its digest."""
        assert _KEY.match(key), key
        write_json(self._cache / f"{key}.json", dict(record))

    def _file(self, name: str) -> Path:
        check_name(name)
        return self._images / f"{urllib.parse.quote(name, safe=':')}.json"


def check_name(name: str) -> None:
    """Raises TemplateError for an invalid image name, which FROM and --image could not express."""
    if not _NAME.fullmatch(name) or len(urllib.parse.quote(name, safe=":")) > _MAX_NAME_BYTES:
        raise TemplateError(
            "is not a valid image name", field="image", received=name[:100],
            fix="use letters, digits and ._- in parts separated by /, with a :tag if needed, "
            f"{_MAX_NAME_BYTES} bytes at most; for example my-task or python:3.11-slim",
        )  # fmt: skip


def _parse(data: bytes, name: str) -> Image:
    try:
        record = json.loads(data)
        version, digest = record.pop("version"), record.pop("digest")
        image = decode_image(record)
        whole = (version, digest, name) == (_VERSION, image.digest, image.name)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(name) from error
    if not whole:
        raise _damaged(name)
    return image


def _damaged(name: str) -> TemplateError:
    return TemplateError(
        "the image's record is damaged, or written by another version", field="image", received=name,
        fix="build or import the image again",
    )  # fmt: skip
