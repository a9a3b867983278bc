"""What a file holds: itself, or the members of an archive, or an object of git; in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 64 << 20
"""Of one file or member, unpacked."""
_MOST_TOTAL = 512 << 20
"""Of one archive's members together."""
_MOST_MEMBERS = 20_000
_MOST_DEPTH = 3
_LOOSE_OBJECT = re.compile(r"(^|/)objects/[0-9a-f]{2}/[0-9a-f]{38,62}$")
_MEDIA = re.compile(r"\.(so[.\d]*|a|o|pt|bin|safetensors|png|jpe?g|gif|woff2?|ttf|mo)$")
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, ValueError)
_ERRORS = (*_DAMAGED, RuntimeError, NotImplementedError, KeyError)

Contents = Iterator[tuple[str, str, bytes | None]]
"""Name, how it is held, and the bytes; None where they are too many or damaged."""


def read_contents(path: Path, name: str) -> Contents:
    """The file at `path`, called `name`; archives and git objects unpacked. A file that cannot be opened
    by its mode or is gone has none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            yield from [] if _MEDIA.search(name) else [(name, "text", None)]
            return
        data = path.read_bytes()
    except OSError:
        yield name, "text", None
        return
    yield from _unpack(name, data, "text", 0)


def _unpack(name: str, data: bytes, how: str, depth: int) -> Contents:
    if _LOOSE_OBJECT.search(name):
        yield name, "git object", _inflate(data)
        return
    if data.startswith(b"PACK") and name.endswith(".pack"):
        yield name, "git object", None  # its objects are differences of one another
        return
    if depth > _MOST_DEPTH:
        yield name, how, None
        return
    try:
        if data.startswith(b"PK\x03\x04"):
            yield from _unzip(name, data, depth)
        elif data.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")):
            yield from _unpack(f"{name}!", _decompress(data), "archive", depth + 1)
        elif data[257:262] == b"ustar":
            yield from _untar(name, data, depth)
        else:
            yield name, how, data
    except _ERRORS:
        yield name, "archive", None


def _inflate(data: bytes) -> bytes | None:
    try:
        inflater = zlib.decompressobj()
        found = inflater.decompress(data, MOST_BYTES)
    except zlib.error:
        return None
    if inflater.unconsumed_tail:
        return None
    return found.partition(b"\0")[2] if found.startswith(b"blob ") else b""


def _decompress(data: bytes) -> bytes:
    openers = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
    with openers[data[:2]](io.BytesIO(data)) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return found


def _unzip(name: str, data: bytes, depth: int) -> Contents:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS or sum(member.file_size for member in members) > _MOST_TOTAL:
            yield name, "archive", None
            return
        for member in members:
            inner = f"{name}!{member.filename}"
            if member.file_size > MOST_BYTES:
                yield inner, "archive", None
            elif not member.is_dir():
                with archive.open(member) as file:
                    yield from _unpack(inner, file.read(MOST_BYTES), "archive", depth + 1)


def _untar(name: str, data: bytes, depth: int) -> Contents:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for count, member in enumerate(archive):
            if count >= _MOST_MEMBERS:
                yield name, "archive", None
                return
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield from _unpack(f"{name}!{member.name}", file.read(MOST_BYTES), "archive", depth + 1)
