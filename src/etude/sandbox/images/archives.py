"""Reads untrusted archives: decompresses, digests, limits and checks them; and gives access to the parts of
an image archive, in a directory or in a tar file.

The standard library's tar reader alone takes a damaged or missing header for the end of the archive, and
reads headers of any size into memory."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import posixpath
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import zstandard

from etude.sandbox.errors import TemplateError

CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 16
"""Most bytes of one pax header or long name."""
_LONG = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
         tarfile.GNUTYPE_LONGLINK)  # fmt: skip


class Readable(Protocol):
    """A binary stream that an archive is read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class Member(tarfile.TarInfo):
    """A tar header that raises ReadError if it is damaged, missing or too large."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the end
            raise tarfile.ReadError(f"a header is damaged, or missing: {error}") from error
        if member.size < 0 or (member.type in _LONG and member.size > MAX_HEADER_BYTES):
            raise tarfile.ReadError(f"a header of impossible size: {member.size}")
        return member

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("sparse files are not supported")  # their map may be of any length


@contextlib.contextmanager
def open_archive(stream: Readable, name: str, is_file: bool = False) -> Iterator[tarfile.TarFile]:
    """Opens the archive in a stream, or with `is_file` in a seekable file.

    Raises TemplateError, also within the block, if the archive is not whole; `name` is the error's field.
    """
    source: Any = stream
    how: Any = {"tarinfo": Member, "encoding": "utf-8"}
    try:
        with (
            tarfile.open(fileobj=source, mode="r:", **how)
            if is_file
            else tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK_BYTES, **how)
        ) as archive:
            yield archive
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise TemplateError(
            f"not a complete tar archive: {error}", field=name, fix="make or download the archive again"
        ) from error


_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
_WINDOW_BYTES = 1 << 27
"""Most memory that a zstd stream may require."""


class DigestReader:
    """Wraps a stream: computes its digest, and raises TemplateError beyond `limit_bytes`."""

    def __init__(self, stream: Readable, name: str, limit_bytes: int) -> None:
        self._stream = stream
        self._name = name
        self._limit_bytes = limit_bytes
        self._state = hashlib.sha256()
        self.num_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes (at most a chunk)."""
        try:
            data = self._stream.read(min(size, CHUNK_BYTES) if size >= 0 else CHUNK_BYTES)
        except _DAMAGE as error:
            raise TemplateError(
                f"damaged compressed data: {error}", field=self._name, fix="make or download it again"
            ) from error
        self.num_bytes += len(data)
        if self.num_bytes > self._limit_bytes:
            raise TemplateError(
                "is larger than allowed", field=self._name, received=f"more than {self._limit_bytes} bytes",
                fix="raise the limit if you trust the source",
            )  # fmt: skip
        self._state.update(data)
        return data

    def drain(self) -> None:
        """Reads to the end."""
        while self.read(CHUNK_BYTES):
            pass

    @property
    def digest(self) -> str:
        """The digest of the bytes read so far, `sha256:...`."""
        return f"sha256:{self._state.hexdigest()}"

    def check(self, expected: str | None) -> None:
        """Raises TemplateError if the bytes read so far have another digest; None: any digest is accepted."""
        if expected is not None and self.digest != expected:
            raise TemplateError(
                f"the content does not match its digest: computed {self.digest}", field=self._name,
                received=expected, fix="make or download the image again",
            )  # fmt: skip


class _Rewound:
    """A stream whose first bytes were read already, and are returned again."""

    def __init__(self, head: bytes, stream: Readable) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        if not self._head:
            return self._stream.read(size)
        size = len(self._head) if size < 0 else size
        data, self._head = self._head[:size], self._head[size:]
        return data


def decompressed(stream: Readable) -> Readable:
    """Decompresses a gzip or zstd stream, recognised by its first bytes; any other is returned as it is."""
    head = b""
    while len(head) < 4 and (more := stream.read(4 - len(head))):
        head += more
    whole = _Rewound(head, stream)
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=whole, mode="rb")  # type: ignore[arg-type]
    if head == _ZSTD:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        return decompressor.stream_reader(whole, read_across_frames=True)  # type: ignore[arg-type]
    return whole


MAX_DOCUMENT_BYTES = 4 << 20
"""Most bytes of an index, a manifest or a configuration."""
MAX_ARCHIVE_BYTES = 64 << 30
MAX_MEMBERS = 100_000
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_MAX_LINKS = 8


class DirectoryBlobs:
    """The named parts of an image archive as files below a directory. Names and links that lead out of it are
    treated as missing."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def has(self, name: str) -> bool:
        """Whether the file exists."""
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
    """The named parts of an image archive as members of an uncompressed tar file, which stays open."""

    def __init__(self, archive: tarfile.TarFile, name: str) -> None:
        self._archive = archive
        self._members: dict[str, tarfile.TarInfo] = {}
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                raise TemplateError("has too many members", field=name, received=count)
            self._members[posixpath.normpath(member.name).lstrip("/")] = member

    def has(self, name: str) -> bool:
        """Whether the member exists."""
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
        """Resolves a name to a regular file; old `docker save` archives store equal layers as links."""
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
    """Opens an image directory or archive; a compressed archive is decompressed into `scratch` first."""
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
    """The path of a blob in an OCI layout. Raises TemplateError for anything but a SHA-256 digest."""
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise TemplateError("is not a SHA-256 digest", field="image", received=digest)
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def read_document(blobs: Blobs, name: str, digest: str | None = None) -> bytes:
    """Reads a small part. Raises TemplateError if it is too large, or does not have the `digest`."""
    with blobs.open(name) as stream:
        reader = DigestReader(stream, name, MAX_DOCUMENT_BYTES)
        data = b"".join(iter(reader.read, b""))
    reader.check(digest)
    return data


def _missing(name: str) -> TemplateError:
    return TemplateError(
        "the image archive lacks a part", field="image", received=name, fix="make or download the image again"
    )
