# ruff: noqa: PTH115, PTH118, PTH208 -- names in layers are bytes, which pathlib does not take
"""Content-addressed layers, each extracted once and shared read-only by all sandboxes.

    ROOT/layers/<hex>/root         the layer's files: a lower layer for overlayfs with `userxattr`
    ROOT/layers/<hex>/layer.json   what it holds, written last
    ROOT/tmp/                      layers in the making, each locked by the process that makes it

A layer appears by a rename, whole or not at all. What a killed process left in `tmp` goes when the store is
opened next. Any number of processes may share a store.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from etude.errors import ResourceError
from etude.kit.durable import DRAFTS, publish_directory, remove_directory, sync_file_system, write_json
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.extract import (
    OPAQUE_MARKER,
    WHITEOUT_PREFIX,
    Extractor,
    give,
    is_opaque,
    is_whiteout,
    storage_error,
)
from etude.sandbox.images.streams import DigestReader, DigestWriter, decompressed
from etude.sandbox.images.tar import MAX_MTIME_S, Entry, Readable, TarReader, TarWriter, Writable

Packed = tuple[Entry, bytes | None]
"""An entry and the path of its data."""


def pack_directory(root: bytes, target: Writable) -> None:
    """Writes the layer that lies in `root` as an archive. Blocks. Raises TemplateError, OSError."""
    writer = TarWriter(target)
    for entry, path in walk(root):
        if path is None:
            writer.add(entry)
        else:
            with open_data(path) as data:
                writer.add(entry, data)
    writer.close()


def walk(root: bytes) -> Iterator[Packed]:
    """Entries of a layer's directory, parents first, each directory's names sorted."""
    seen: dict[tuple[int, int], bytes] = {}
    pending: list[tuple[bytes, bytes]] = [(b"", root)]
    while pending:
        name, path = pending.pop()
        status = os.lstat(path)
        if name.rpartition(b"/")[2].startswith(WHITEOUT_PREFIX):
            raise foreign(name, "a name that only whiteouts may have")
        yield from _entries(name, path, status, seen)
        if stat.S_ISDIR(status.st_mode):
            below = sorted(os.listdir(path), reverse=True)
            pending += [(name + b"/" + part if name else part, os.path.join(path, part)) for part in below]


def _entries(
    name: bytes, path: bytes, status: os.stat_result, seen: dict[tuple[int, int], bytes]
) -> Iterator[Packed]:
    mode, mtime_s = stat.S_IMODE(status.st_mode), time_of(status)
    if stat.S_ISDIR(status.st_mode):
        yield Entry(name + b"/" if name else b"./", "dir", mode, mtime_s), None
        if is_opaque(path):
            yield Entry(name + b"/" + OPAQUE_MARKER if name else OPAQUE_MARKER, "file", 0o600), None
    elif stat.S_ISLNK(status.st_mode):
        yield Entry(name, "symlink", 0o777, mtime_s, link=os.readlink(path)), None
    elif is_whiteout(status):
        folder, slash, last = name.rpartition(b"/")
        yield Entry(folder + slash + WHITEOUT_PREFIX + last, "file", 0o600), None
    elif not stat.S_ISREG(status.st_mode):
        raise foreign(name, "a device, socket or pipe")
    else:
        identity = (status.st_dev, status.st_ino)
        first = seen.get(identity) if status.st_nlink > 1 else None
        if first is not None:
            yield Entry(name, "hardlink", mode, mtime_s, link=first), None
            return
        if status.st_nlink > 1:
            seen[identity] = name
        yield Entry(name, "file", mode, mtime_s, status.st_size), path


def open_data(path: bytes) -> BinaryIO:
    """Opens a regular file that may have been replaced meanwhile: never through a link, never a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb")


def time_of(status: os.stat_result) -> int:
    """Modification time in whole seconds, as an archive holds it."""
    return min(max(status.st_mtime_ns // 10**9, 0), MAX_MTIME_S)


def foreign(name: bytes, what: str) -> TemplateError:
    """The error for a file that no layer holds."""
    return TemplateError(f"the layer holds {what}", field="layer", received=name.decode(errors="replace"))


MAX_LAYER_BYTES = 8 << 30
MAX_LAYER_ENTRIES = 1_000_000
NOBODY = 65534
_VERSION = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One layer of a store."""

    digest: str
    """`sha256:...` of the uncompressed archive that it came from: OCI's diff_id."""
    packed_digest: str
    """`sha256:...` of the archive that `export_tar` writes."""
    packed_bytes: int
    size_bytes: int
    """Of all its files."""
    num_entries: int
    num_left_out: int
    """Devices and named pipes of the archive."""


def default_owner() -> tuple[int, int]:
    """Who owns all files of all layers: the one user that sandboxes map."""
    return (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


class LayerStore:
    """Layers below the directory `root`. All methods block; call them in a thread.

    Raises TemplateError for a layer that is missing, damaged or foreign, and for archives that are;
    ResourceError for what the machine lacks.
    """

    def __init__(self, root: Path, owner: tuple[int, int] | None = None) -> None:
        self.root = root
        self.owner = owner or default_owner()
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
            contents = Extractor(files, self.owner, max_entries, name).run(TarReader(reader, name))
            reader.drain()
            if expected is not None and reader.digest != expected:
                raise TemplateError(
                    f"the layer's digest is {reader.digest}", field=name, received=expected,
                    fix="make or download the image again",
                )  # fmt: skip
            if not self.has(reader.digest):
                packed = DigestWriter()
                pack_directory(os.fsencode(files), packed)
                info = LayerInfo(
                    reader.digest, packed.digest, packed.num_bytes,
                    contents.size_bytes, contents.num_entries, contents.num_left_out,
                )  # fmt: skip
                self._publish(folder / "layer", info)
        return reader.digest

    def has(self, digest: str) -> bool:
        """Whether the layer is here, and its record whole."""
        try:
            self.info(digest)
        except TemplateError:
            return False
        return True

    def find(self, digest: str) -> str | None:
        """The layer that came from the archive of this digest, or that `export_tar` writes as it."""
        if self.has(digest):
            return digest
        return next((own for own in self.list() if self.info(own).packed_digest == digest), None)

    def info(self, digest: str) -> LayerInfo:
        """What is known of a layer. Raises TemplateError if it is missing, torn or of another owner."""
        folder = self._folder(digest)
        try:
            record = json.loads((folder / "layer.json").read_bytes())
            info = LayerInfo(**record["layer"])
            version, owner = record["version"], tuple(record["owner"])
        except FileNotFoundError as error:
            raise self._missing(digest) from error
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(digest, "its record does not parse") from error
        if version != _VERSION or owner != self.owner or info.digest != digest:
            raise _damaged(digest, f"it was made for owner {owner}, version {version}, as {info.digest}")
        if not (folder / "root").is_dir():
            raise _damaged(digest, "its files are gone")
        return info

    def path(self, digest: str) -> Path:
        """The directory to mount as a lower layer. Raises as `info`."""
        self.info(digest)
        return self._folder(digest) / "root"

    def list(self) -> list[str]:
        """Digests of the layers here, sorted; damaged ones are left out."""
        digests = (f"sha256:{folder.name}" for folder in self._layers.iterdir())
        return sorted(digest for digest in digests if _DIGEST.match(digest) and self.has(digest))

    def remove(self, digest: str) -> None:
        """Deletes a layer, damaged or not, that no sandbox uses. Raises TemplateError if it is missing."""
        try:
            remove_directory(self._folder(digest))
        except FileNotFoundError as error:
            raise self._missing(digest) from error

    def verify(self, digest: str) -> None:
        """Reads the whole layer, and raises TemplateError if a name, mode, time or byte of it has changed."""
        self._pack(digest, DigestWriter())

    def export_tar(self, digest: str, target: Writable) -> str:
        """Writes the layer as a plain OCI archive, sorted; returns that archive's digest.

        Equal layers give equal bytes. The digest is `digest` itself if the layer came from such an archive.
        Raises TemplateError for a damaged layer, at the end.
        """
        return self._pack(digest, DigestWriter(target.write))

    def scratch(self) -> AbstractContextManager[Path]:
        """A temporary directory on the store's file system; goes with the block, or with this process."""
        return ScratchDirectory(self._temporary)

    def _pack(self, digest: str, packed: DigestWriter) -> str:
        info = self.info(digest)
        try:
            pack_directory(os.fsencode(self._folder(digest) / "root"), packed)
        except FileNotFoundError as error:
            raise _damaged(digest, "a file of it is gone") from error
        if packed.digest != info.packed_digest:
            raise _damaged(digest, "its files were changed")
        return packed.digest

    def _publish(self, folder: Path, info: LayerInfo) -> None:
        record = {"version": _VERSION, "owner": self.owner, "layer": dataclasses.asdict(info)}
        write_json(folder / "layer.json", record)
        target = self._folder(info.digest)
        try:
            sync_file_system(folder)
            publish_directory(folder, target, keep=lambda: self.has(info.digest))
        except OSError as error:
            raise storage_error(error, "layer store", info.digest) from error

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise TemplateError(
                "is no layer digest", field="layer", received=digest, fix="sha256:<64 hex digits>"
            )
        return self._layers / digest.removeprefix("sha256:")

    def _missing(self, digest: str) -> TemplateError:
        return TemplateError(
            "no such layer in the store",
            field="layer",
            received=digest,
            fix="build or import the image again",
        )


def _damaged(digest: str, reason: str) -> TemplateError:
    return TemplateError(
        f"the layer is damaged: {reason}", field="layer", received=digest,
        fix="remove the layer and build or import the image again",
    )  # fmt: skip
