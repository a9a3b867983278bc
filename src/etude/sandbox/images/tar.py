"""Tar archives of strangers: the standard library's reader, made strict.

By itself it takes a damaged header in mid-archive, or none at all, for the end, and reads a header of any
size into memory.
"""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from typing import Any, Protocol

from etude.sandbox.errors import TemplateError

CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 16
"""Of one pax header or long name."""
_LONG = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
         tarfile.GNUTYPE_LONGLINK)  # fmt: skip


class Readable(Protocol):
    """What an archive is read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class Member(tarfile.TarInfo):
    """A header that is whole, or the error that says why not."""

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
    """The archive in a stream, or in a file that can be read in any order.

    Raises TemplateError, in the block too, for whatever is not a whole archive; `name` stands in it.
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
            f"not a whole tar archive: {error}", field=name, fix="make or download the archive again"
        ) from error
