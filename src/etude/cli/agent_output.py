"""Output whose reader may leave: `etude agent ... | head -1`."""

from __future__ import annotations

import io
import json
import os
import select
import sys
from collections.abc import Callable
from typing import IO, Any, TextIO, cast

from rich.console import Console

EXIT_CLOSED_PIPE = 141
"""As of a program that the signal of a closed pipe ends: 128 + SIGPIPE."""
_PIPE_COLUMNS = 1_000_000


class OutputConsole(Console):
    """A console that lays text out for the width of a terminal only: in a pipe or file every line is whole.

    When its reader has left it ends the program, but not with rich's 1, which is what some commands find.
    """

    def __init__(self, **settings: Any) -> None:
        """`settings`: rich's."""
        super().__init__(highlight=False, **settings)
        if not self.is_terminal:
            self.width = _PIPE_COLUMNS

    def on_broken_pipe(self) -> None:
        """Raises SystemExit."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(EXIT_CLOSED_PIPE) from None


class Pipe(io.TextIOBase):
    """One of this process's outputs. When its reader has left, what is written goes nowhere.

    The first write that finds nobody calls `on_gone`, once. Nothing is raised, so that the writer can
    come to an orderly end. Not to be made while rich has redirected the stream.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """None: the program was started with that output closed."""
        super().__init__()
        self._stream = stream
        self.gone = False
        self.error: OSError | None = None
        """Why nothing can be written, where it is not that the reader left: a full disk."""
        self.on_gone: Callable[[], object] = lambda: None

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the text."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor. Raises OSError where there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("closed")
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        """Writes, if there is anybody to read it."""
        if self._stream is not None and not self.gone:
            try:
                self._stream.write(text)
            except OSError as error:
                self.leave(error)
        return len(text)

    def flush(self) -> None:
        """Hands over what was written."""
        if self._stream is not None and not self.gone:
            try:
                self._stream.flush()
            except OSError as error:
                self.leave(error)

    def has_left(self) -> bool:
        """Whether it is a pipe that nobody reads any more."""
        try:
            descriptor = self.fileno()
        except OSError:
            return False
        asked = select.poll()
        asked.register(descriptor, 0)
        return any(what & select.POLLERR for _, what in asked.poll(0))

    def print_line(self, document: dict[str, Any]) -> None:
        """One JSON object on a line, at once."""
        self.write(json.dumps(document, ensure_ascii=True) + "\n")
        self.flush()

    def console(self) -> Console:
        """A console that writes here."""
        return OutputConsole(file=cast(IO[str], self))

    def leave(self, error: OSError) -> None:
        """Nothing more can be written."""
        self.gone = True
        self.error = None if isinstance(error, BrokenPipeError) else error
        # What is left in the stream's buffer is written as the interpreter ends, and must not fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self.fileno())
        finally:
            os.close(nowhere)
        self.on_gone()


def standard_output() -> Pipe:
    """This process's standard output as it is now."""
    return Pipe(sys.stdout)


def standard_error() -> Pipe:
    """This process's standard error as it is now."""
    return Pipe(sys.stderr)
