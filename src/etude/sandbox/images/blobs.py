"""Where an image archive's parts lie: in a directory, or in a tar file that is read in place."""

from __future__ import annotations

import contextlib
import posixpath
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.streams import DigestReader, decompressed
from etude.sandbox.images.tar import Readable, open_archive

MAX_DOCUMENT_BYTES = 4 << 20
"""Of an index, a manifest or a configuration."""
MAX_ARCHIVE_BYTES = 64 << 30
MAX_MEMBERS = 100_000
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MAX_LINKS = 8


class DirectoryBlobs:
    """Named parts of an image archive, as files below a directory. A name or link that leads out of it names
    nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        path = self._root / name
        return path.is_file() and path.resolve().is_relative_to(self._root)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        """A part as a stream. Raises TemplateError if it is missing."""
        if not self.has(name):
            raise _missing(name)
        try:
            file = (self._root / name).open("rb")
        except OSError as error:
            raise _missing(name) from error
        with file:
            yield file


class TarBlobs:
    """The same as members of an uncompressed tar file, which stays open."""

    def __init__(self, archive: tarfile.TarFile, name: str) -> None:
        self._archive = archive
        self._members: dict[str, tarfile.TarInfo] = {}
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                raise TemplateError("has too many members", field=name, received=count)
            self._members[posixpath.normpath(member.name).lstrip("/")] = member

    def has(self, name: str) -> bool:
        """Whether there is such a member."""
        return self._find(name) is not None

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        member = self._find(name)
        contents = None if member is None else self._archive.extractfile(member)
        if contents is None:
            raise _missing(name)
        with contents:
            yield contents

    def _find(self, name: str) -> tarfile.TarInfo | None:
        """A regular file. Old archives of `docker save` name equal layers by links."""
        for _ in range(_MAX_LINKS):
            name = posixpath.normpath(name)
            member = self._members.get(name)
            if member is None or not (member.issym() or member.islnk()):
                return member if member is not None and member.isreg() and not member.issparse() else None
            folder = posixpath.dirname(name) if member.issym() else ""
            name = posixpath.join(folder, member.linkname)
        return None


Blobs = DirectoryBlobs | TarBlobs


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
    with file, contextlib.ExitStack() as stack:
        file.seek(257)
        is_plain = file.read(5) == b"ustar"
        file.seek(0)
        if not is_plain:
            whole = stack.enter_context((scratch / "archive.tar").open("w+b"))
            shutil.copyfileobj(DigestReader(decompressed(file), source.name, MAX_ARCHIVE_BYTES), whole)
            whole.seek(0)
            file = whole
        yield TarBlobs(stack.enter_context(open_archive(file, source.name, is_file=True)), source.name)


def blob_name(digest: object) -> str:
    """Where OCI keeps a blob. Raises TemplateError for anything but a SHA-256 digest."""
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise TemplateError("is no SHA-256 digest", field="image", received=digest)
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def read_document(blobs: Blobs, name: str, digest: str | None = None) -> bytes:
    """A small part, whole. Raises TemplateError if it is too large, or not what `digest` says."""
    with blobs.open(name) as stream:
        reader = DigestReader(stream, name, MAX_DOCUMENT_BYTES)
        data = b"".join(iter(reader.read, b""))
    reader.check(digest)
    return data


def _missing(name: str) -> TemplateError:
    return TemplateError(
        "the image archive lacks a part", field="image", received=name, fix="make or download the image again"
    )
