"""Bytes and variable-length numbers (LEB128), one after another."""

from __future__ import annotations


def pack_number(value: int) -> bytes:
    """Encodes an integer >= 0: seven bits per byte, lowest first."""
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


class Reader:
    """Reads bytes and numbers in their order. Raises ValueError if bytes are missing."""

    def __init__(self, data: memoryview) -> None:
        """`data`: bytes, format `B`."""
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Number of unread bytes."""
        return len(self._data) - self._at

    def byte(self) -> int:
        """One byte."""
        return self.raw(1)[0]

    def number(self) -> int:
        """See `pack_number`."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number is too long")

    def raw(self, count: int) -> memoryview:
        """The next `count` bytes, without a copy."""
        if count > self.left:
            raise ValueError("the end is missing")
        self._at += count
        return self._data[self._at - count : self._at]
