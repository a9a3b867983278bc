"""Where an image archive's parts lie: in a directory, or in a tar file that is read in place."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.streams import DigestReader, decompressed
from etude.sandbox.images.tar import Readable, Slice, TarReader

MAX_DOCUMENT_BYTES = 4 << 20
"""Of an index, a manifest or a configuration."""
MAX_ARCHIVE_BYTES = 64 << 30
MAX_MEMBERS = 100_000
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MAX_LINKS = 8


class Blobs(Protocol):
    """Named parts of an image archive. Blocks."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> contextlib.AbstractContextManager[Readable]:
        """A part as a stream. Raises TemplateError if it is missing."""
        ...


class DirectoryBlobs(Blobs):
    """Parts as files below a directory; a name or link that leads out of it names nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        path = self._root / name
        return path.is_file() and path.resolve().is_relative_to(self._root)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        if not self.has(name):
            raise _missing(name)
        try:
            file = (self._root / name).open("rb")
        except OSError as error:
            raise _missing(name) from error
        with file:
            yield file


class TarBlobs(Blobs):
    """Parts as members of an uncompressed tar file, which stays open."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        reader = TarReader(file, name)
        for count, entry in enumerate(reader):
            if count >= MAX_MEMBERS:
                raise TemplateError("has too many members", field=name, received=count)
            key = posixpath.normpath(entry.name.decode(errors="replace")).lstrip("/")
            if entry.kind == "file":
                self._places[key] = (reader.offset, entry.size_bytes)
            elif entry.kind in ("symlink", "hardlink"):
                # Old archives of `docker save` name equal layers by links.
                link = entry.link.decode(errors="replace")
                folder = posixpath.dirname(key) if entry.kind == "symlink" else ""
                self._links[key] = posixpath.normpath(posixpath.join(folder, link))

    def has(self, name: str) -> bool:
        """Whether there is such a member."""
        return self._find(name) in self._places

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        place = self._places.get(self._find(name))
        if place is None:
            raise _missing(name)
        yield Slice(self._file, *place)

    def _find(self, name: str) -> str:
        name = posixpath.normpath(name)
        for _ in range(_MAX_LINKS):
            if name not in self._links:
                break
            name = self._links[name]
        return name


@contextlib.contextmanager
def open_blobs(source: Path, scratch: Path) -> Iterator[Blobs]:
    """The parts of an image directory or archive; a compressed archive is unpacked into `scratch` first."""
    if source.is_dir():
        yield DirectoryBlobs(source)
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise TemplateError(
            f"cannot be read: {error.strerror}",
            field="image",
            received=str(source),
            fix="name an OCI archive",
        ) from error
    with file:
        if _is_plain(file):
            yield TarBlobs(file, source.name)
            return
        with (scratch / "archive.tar").open("w+b") as whole:
            shutil.copyfileobj(DigestReader(decompressed(file), source.name, MAX_ARCHIVE_BYTES), whole)
            whole.seek(0)
            yield TarBlobs(whole, source.name)


def _is_plain(file: BinaryIO) -> bool:
    file.seek(257)
    plain = file.read(5) == b"ustar"
    file.seek(0)
    return plain


def blob_name(digest: object) -> str:
    """Where OCI keeps a blob. Raises TemplateError for anything but a SHA-256 digest."""
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise TemplateError("is no SHA-256 digest", field="image", received=digest)
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def read_document(blobs: Blobs, name: str, digest: str | None = None) -> bytes:
    """A small part, whole. Raises TemplateError if it is too large, or not what `digest` says."""
    with blobs.open(name) as stream:
        reader = DigestReader(stream, name, MAX_DOCUMENT_BYTES)
        parts: list[bytes] = []
        while part := reader.read():
            parts.append(part)
    data = b"".join(parts)
    if digest is not None and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise TemplateError(
            "the content is not what its digest says", field=name, received=digest,
            fix="make or download the image again",
        )  # fmt: skip
    return data


def _missing(name: str) -> TemplateError:
    return TemplateError(
        "the image archive lacks a part", field="image", received=name, fix="make or download the image again"
    )
