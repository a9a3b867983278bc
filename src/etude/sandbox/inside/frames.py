"""The framing protocol between owner, fork server and sandbox: a JSON header and raw bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

Header = dict[str, Any]

MAX_HEADER_BYTES = 32 << 20
MAX_PAYLOAD_BYTES = 256 << 20
MAX_REQUEST_BYTES = 1 << 16
"""Size of a request to the fork server, which is one packet: a longer one would be cut."""
_SIZES = struct.Struct("<II")
_encode = json.JSONEncoder(separators=(",", ":")).encode


class FrameError(ValueError):
    """A malformed frame was received, or a frame to be sent is too large."""


def pack(header: Header, payload: bytes | bytearray = b"") -> bytes:
    """One frame: two little-endian lengths, the header, the payload. Raises FrameError if too large."""
    return pack_head(header, len(payload)) + payload


def pack_head(header: Header, payload_bytes: int) -> bytes:
    """The part of a frame before its payload. Raises as `pack`."""
    head = _encode(header).encode()
    if len(head) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"frame of {len(head)} + {payload_bytes} bytes")
    return _SIZES.pack(len(head), payload_bytes) + head


class Unpacker:
    """Incremental parser: bytes in, complete frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[Header, bytes]]:
        """The frames that `data` completes. Raises FrameError for oversized or malformed ones."""
        self._buffer += data
        frames: list[tuple[Header, bytes]] = []
        while len(self._buffer) >= _SIZES.size:
            head_bytes, payload_bytes = _SIZES.unpack_from(self._buffer)
            if head_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise FrameError(f"frame of {head_bytes} + {payload_bytes} bytes")
            start, end = _SIZES.size + head_bytes, _SIZES.size + head_bytes + payload_bytes
            if len(self._buffer) < end:
                break
            try:
                header = json.loads(self._buffer[_SIZES.size : start])
            except (ValueError, RecursionError) as error:
                raise FrameError(f"header is not JSON: {error}") from error
            with memoryview(self._buffer) as view:
                # Slicing the buffer itself would copy once more what may be most of the memory.
                frames.append((header, bytes(view[start:end])))
            del self._buffer[:end]
        return frames
