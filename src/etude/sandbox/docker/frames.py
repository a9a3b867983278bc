"""How an engine mixes a container's output into one stream: frames with a header of eight bytes.

byte 0      1 standard output, 2 standard error (0 standard input, 3 the engine's own error)
bytes 1-3   zero
bytes 4-7   length of what follows, big-endian
"""

from __future__ import annotations

import struct

STDOUT, STDERR, SYSTEM = 1, 2, 3
MAX_FRAME_BYTES = 16 << 20
_KEPT_BYTES = 4000
_HEADER = struct.Struct(">BxxxI")


def pack_frame(stream: int, data: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(stream, len(data)) + data


class Demultiplexer:
    """Takes bytes as they come, gives standard output and keeps the end of standard error."""

    def __init__(self) -> None:
        self._stream = 0
        self._left = 0
        self._header = bytearray()
        self.errors = bytearray()
        """The last of what came on standard error, or from the engine itself."""

    def feed(self, data: bytes) -> bytes:
        """The bytes of standard output in `data`. Raises ValueError for what are no frames."""
        output = bytearray()
        view = memoryview(data)
        while view:
            if not self._left:
                missing = _HEADER.size - len(self._header)
                self._header += view[:missing]
                view = view[missing:]
                if len(self._header) < _HEADER.size:
                    break
                self._begin()
                continue
            piece = view[: self._left]
            self._left -= len(piece)
            view = view[len(piece) :]
            if self._stream == STDOUT:
                output += piece
            else:
                self.errors += piece
                del self.errors[:-_KEPT_BYTES]
        return bytes(output)

    def _begin(self) -> None:
        self._stream, self._left = _HEADER.unpack(self._header)
        zeros = self._header[1:4]
        self._header.clear()
        if self._stream not in (0, STDOUT, STDERR, SYSTEM) or any(zeros) or self._left > MAX_FRAME_BYTES:
            raise ValueError(f"no frame of stream {self._stream} and {self._left} bytes")
