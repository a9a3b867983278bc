"""Standard input by lines, read without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys

_READ_BYTES = 4096


class Lines:
    """Standard input by lines. One reader at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._ended = False
        self._descriptor: int | None = None
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  (it was closed: `<&-`)
            self._ended = True
            return
        try:
            self._descriptor = sys.stdin.fileno()
        except (io.UnsupportedOperation, ValueError, OSError):
            return

    @property
    def is_terminal(self) -> bool:
        """Whether standard input is a terminal."""
        return self._descriptor is not None and os.isatty(self._descriptor)

    def prompt(self, text: str) -> str | None:
        """Reads a line from a terminal, with editing keys; blocks. None at the end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() its editing keys)
        try:
            return input(text)
        except EOFError:
            return None

    async def has_words(self) -> bool:
        """Whether anything but whitespace precedes the end of input. Consumes nothing; may be cancelled."""
        while not self._buffer.strip() and not self._ended:
            await self._read_more()
        return bool(self._buffer.strip())

    async def read(self) -> str | None:
        """The next line without its newline; None at the end of input. May be cancelled."""
        while b"\n" not in self._buffer and not self._ended:
            await self._read_more()
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")

    async def _read_more(self) -> None:
        data = await self._more()
        self._buffer += data
        self._ended = not data

    async def _more(self) -> bytes:
        if self._descriptor is None:
            return sys.stdin.readline().encode()
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        try:
            loop.add_reader(self._descriptor, lambda: readable.done() or readable.set_result(None))
        except PermissionError:  # a regular file: always readable
            return os.read(self._descriptor, _READ_BYTES)
        try:
            await readable
            return os.read(self._descriptor, _READ_BYTES)
        finally:
            loop.remove_reader(self._descriptor)
