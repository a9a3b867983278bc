"""Byte streams of layers: decompressed, digested and bounded while they are read."""

from __future__ import annotations

import gzip
import hashlib
import zlib

import zstandard

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.tar import CHUNK_BYTES, Readable

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
_WINDOW_BYTES = 1 << 27
"""Memory that a zstd stream may ask for."""


class DigestReader:
    """Passes a stream on, digests it, and raises TemplateError beyond `limit_bytes`."""

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
        """`sha256:...` of what was read so far."""
        return f"sha256:{self._state.hexdigest()}"

    def check(self, expected: str | None) -> None:
        """Raises TemplateError if what was read so far has another digest; None: it may have any."""
        if expected is not None and self.digest != expected:
            raise TemplateError(
                f"the content is not what its digest says: it has {self.digest}", field=self._name,
                received=expected, fix="make or download the image again",
            )  # fmt: skip


class _Rewound:
    """A stream whose first bytes have been looked at."""

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
    """The stream itself, or what gzip or zstd made it of, recognised by its first bytes."""
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
