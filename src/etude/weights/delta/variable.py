"""Bytes and numbers of variable length (LEB128), written and read one after another."""

from __future__ import annotations


def pack_number(value: int) -> bytes:
    """A whole number >= 0: seven bits a byte, lowest first."""
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


class Writer:
    """Collects bytes."""

    def __init__(self) -> None:
        self._parts = bytearray()

    def byte(self, value: int) -> None:
        """One byte."""
        self._parts.append(value)

    def number(self, value: int) -> None:
        """See `pack_number`."""
        self._parts += pack_number(value)

    def raw(self, data: bytes | memoryview) -> None:
        """Bytes whose number the reader knows."""
        self._parts += data

    def finish(self) -> bytes:
        """All that was written."""
        return bytes(self._parts)


class Reader:
    """Reads what a Writer wrote. Raises ValueError where bytes are missing."""

    def __init__(self, data: memoryview) -> None:
        """`data`: bytes, format `B`."""
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not yet read."""
        return len(self._data) - self._at

    def byte(self) -> int:
        """One byte."""
        return self.raw(1)[0]

    def number(self) -> int:
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
        """The next `count` bytes, not copied."""
        if count > self.left:
            raise ValueError("the end is missing")
        self._at += count
        return self._data[self._at - count : self._at]
