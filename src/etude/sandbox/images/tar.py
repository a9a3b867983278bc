"""Tar archives of strangers, read strictly; ours, written so that equal trees give equal bytes.

The standard library's reader takes a damaged header in mid-archive for the end, and reads a header of any
size into memory. A layer store must notice the first and bound the second, so this reader knows the format
itself: ustar, pax (`path`, `linkpath`, `size`, `mtime`) and GNU long names. Sparse files, which layers do not
hold, are refused. Names are bytes throughout. Linear in the length of the archive.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

from etude.sandbox.errors import TemplateError

BLOCK = 512
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20
"""Of one pax header or long name."""
MAX_MTIME_S = 8**11 - 1
"""The largest time that a ustar header holds."""

Kind = Literal["file", "dir", "symlink", "hardlink", "other"]

_ZEROS = bytes(BLOCK)
_KINDS: dict[bytes, Kind] = {
    b"0": "file", b"\0": "file", b"7": "file", b"1": "hardlink", b"2": "symlink",
    b"5": "dir", b"3": "other", b"4": "other", b"6": "other",
}  # fmt: skip
_FLAGS: dict[Kind, bytes] = {"file": b"0", "hardlink": b"1", "symlink": b"2", "dir": b"5"}
_OCTAL = re.compile(rb"[0-7]*\Z")
_RECORD = re.compile(rb"([0-9]{1,9}) ")
_DECIMAL = re.compile(rb"(-?[0-9]{1,18})(?:\.[0-9]*)?\Z")


class Readable(Protocol):
    """What an archive is read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class Writable(Protocol):
    """What an archive is written to."""

    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of an archive. `other` is a device or a named pipe."""

    name: bytes
    """As it stands in the archive: not to be trusted."""
    kind: Kind
    mode: int = 0o644
    mtime_s: int = 0
    size_bytes: int = 0
    """Of the data that follows; 0 for all but files."""
    link: bytes = b""
    """Target of a symbolic link, or name of the member that a hard link repeats."""


class TarReader:
    """Iterates over an archive's entries; `read` gives the present entry's data.

    Raises TemplateError for whatever is not a whole archive.
    """

    def __init__(self, stream: Readable, name: str) -> None:
        self._stream = stream
        self._name = name
        self._left_bytes = 0
        self._padding = 0
        self.offset = 0
        """Bytes read so far: at an entry, where its data begins."""

    def __iter__(self) -> Iterator[Entry]:
        extras: dict[bytes, bytes] = {}
        while True:
            self._skip_rest()
            block = self._exactly(BLOCK)
            if block == _ZEROS:
                if extras:
                    raise self.error("ends after a header that belongs to an entry")
                return
            self._check_sum(block)
            flag, size = block[156:157], self._number(block[124:136])
            if flag in b"xgLK":
                body = self._body(size)
                if flag == b"x":
                    extras |= self._parse_pax(body)
                elif flag != b"g":
                    extras[b"path" if flag == b"L" else b"linkpath"] = body.split(b"\0", 1)[0]
            elif flag != b"V":
                yield self._entry(block, flag, size, extras)
                extras = {}

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes of the present entry's data; empty at its end."""
        wanted = self._left_bytes if size < 0 else min(size, self._left_bytes)
        data = self._exactly(wanted)
        self._left_bytes -= wanted
        return data

    def error(self, message: str, received: object = None) -> TemplateError:
        """The error for this archive."""
        return TemplateError(
            f"not a whole tar archive: {message}", field=self._name, received=received,
            fix="make or download the archive again",
        )  # fmt: skip

    def _entry(self, block: bytes, flag: bytes, size: int, extras: dict[bytes, bytes]) -> Entry:
        kind = _KINDS.get(flag)
        if kind is None:
            raise self.error("an entry of a type that layers do not hold", flag.decode("latin-1"))
        name = block[:100].split(b"\0", 1)[0]
        if block[257:263] == b"ustar\0":
            prefix = block[345:500].split(b"\0", 1)[0]
            name = prefix + b"/" + name if prefix else name
        name = extras.get(b"path", name)
        link = extras.get(b"linkpath", block[157:257].split(b"\0", 1)[0])
        if kind == "file" and name.endswith(b"/"):
            kind = "dir"
        if b"size" in extras:
            size = self._decimal(extras[b"size"])
        mtime = self._decimal(extras[b"mtime"]) if b"mtime" in extras else self._number(block[136:148], True)
        if kind != "file":
            size = 0
        self._left_bytes = size
        self._padding = -size % BLOCK
        mode = self._number(block[100:108]) & 0o7777
        return Entry(name, kind, mode, min(max(mtime, 0), MAX_MTIME_S), size, link)

    def _check_sum(self, block: bytes) -> None:
        blanked = block[:148] + b" " * 8 + block[156:]
        wanted = self._number(block[148:156])
        if wanted != sum(blanked) and wanted != sum(struct.unpack(f"{BLOCK}b", blanked)):
            raise self.error("a header's checksum is wrong")

    def _number(self, field: bytes, signed: bool = False) -> int:
        if field[0] & 0x80:
            value = int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else (
                int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big"))  # fmt: skip
        else:
            digits = field.strip(b" \0")
            if not _OCTAL.match(digits):
                raise self.error("a header holds no number where one belongs", field)
            value = int(digits or b"0", 8)
        if (value < 0 and not signed) or value >= 1 << 62:
            raise self.error("a header holds an impossible number", value)
        return value

    def _decimal(self, text: bytes) -> int:
        match = _DECIMAL.match(text)
        if match is None:
            raise self.error("a pax header holds no number where one belongs", text[:40])
        return max(0, int(match[1]))

    def _parse_pax(self, body: bytes) -> dict[bytes, bytes]:
        records: dict[bytes, bytes] = {}
        start = 0
        while start < len(body):
            match = _RECORD.match(body, start)
            end = start + int(match[1]) if match else 0
            if match is None or end <= match.end() or end > len(body) or body[end - 1 : end] != b"\n":
                raise self.error("a pax header does not parse")
            key, equals, value = body[match.end() : end - 1].partition(b"=")
            if not equals:
                raise self.error("a pax header does not parse")
            if key.startswith(b"GNU.sparse"):
                raise self.error("sparse files are not supported")
            records[key] = value
            start = end
        return records

    def _body(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise self.error("a header of impossible size", size)
        body = self._exactly(size)
        self._exactly(-size % BLOCK)
        return body

    def _skip_rest(self) -> None:
        while self.read(CHUNK_BYTES):
            pass
        self._exactly(self._padding)
        self._padding = 0

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._stream.read(size)
            if not part:
                raise self.error("it ends too early")
            parts.append(part)
            size -= len(part)
            self.offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class TarWriter:
    """Writes entries as they come: pax format, owner 0, nothing in it but what `Entry` holds."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream

    def add(self, entry: Entry, data: Readable | None = None) -> None:
        """Appends an entry and `size_bytes` of `data`. Raises TemplateError if `data` is shorter."""
        records = dict(self._pax_records(entry))
        if records:
            body = b"".join(_pax_record(key, value) for key, value in records.items())
            header = Entry(b"././@PaxHeader", "file", size_bytes=len(body))
            self._stream.write(_header(header, b"x") + body + bytes(-len(body) % BLOCK))
        self._stream.write(_header(entry, _FLAGS[entry.kind]))
        left = entry.size_bytes if entry.kind == "file" else 0
        padding = bytes(-left % BLOCK)
        while left:
            part = data.read(min(left, CHUNK_BYTES)) if data else b""
            if not part:
                raise TemplateError("changed while it was read", field=entry.name.decode(errors="replace"))
            self._stream.write(part)
            left -= len(part)
        self._stream.write(padding)

    def add_bytes(self, name: str, data: bytes) -> None:
        """Appends a regular file."""
        self.add(Entry(name.encode(), "file", size_bytes=len(data)), io.BytesIO(data))

    def close(self) -> None:
        """Writes the end of the archive; the stream stays open."""
        self._stream.write(_ZEROS * 2)

    @staticmethod
    def _pax_records(entry: Entry) -> Iterator[tuple[bytes, bytes]]:
        texts = [(b"path", entry.name), (b"linkpath", entry.link)]
        # Readers take pax values for UTF-8 unless told otherwise.
        if not all(_is_utf8(text) for _, text in texts):
            yield b"hdrcharset", b"BINARY"
        for key, text in texts:
            if len(text) > 100 or not text.isascii():
                yield key, text
        if entry.size_bytes >= 8**11:
            yield b"size", b"%d" % entry.size_bytes


def _pax_record(key: bytes, value: bytes) -> bytes:
    rest = len(key) + len(value) + 3
    size = rest + len(str(rest))
    size = rest + len(str(size))
    return b"%d %s=%s\n" % (size, key, value)


def _header(entry: Entry, flag: bytes) -> bytes:
    size = entry.size_bytes if entry.size_bytes < 8**11 else 0
    head = b"%s%07o\0%07o\0%07o\0%011o\0%011o\0" % (
        entry.name[:100].ljust(100, b"\0"), entry.mode & 0o7777, 0, 0, size, entry.mtime_s,
    )  # fmt: skip
    tail = flag + entry.link[:100].ljust(100, b"\0") + b"ustar\x0000"
    tail = tail.ljust(BLOCK - 156, b"\0")
    total = sum(head) + sum(tail) + 8 * ord(" ")
    return head + b"%06o\0 " % total + tail


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(slots=True)
class Slice:
    """A part of an open file as a stream of its own; several may share the file one after another."""

    file: BinaryIO
    start: int
    size_bytes: int

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; all that is left if negative."""
        wanted = self.size_bytes if size < 0 else min(size, self.size_bytes)
        self.file.seek(self.start)
        data = self.file.read(wanted)
        self.start += len(data)
        self.size_bytes -= len(data)
        return data
