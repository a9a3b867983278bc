"""Output to a pipe that its reader may close: `etude agent ... | head -1`."""

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
"""Exit code of a program that was ended by the signal of a closed pipe: 128 + SIGPIPE."""
_PIPE_COLUMNS = 1_000_000


class OutputConsole(Console):
    """A console that wraps text at the width of a terminal only: in a pipe or file lines are not wrapped.

    If its reader closes the pipe, it ends the program, but not with rich's exit code 1, which some commands
    use as a result.
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
    """Standard output or error of this process. After its reader has closed it, writes are discarded.

    The first write that fails calls `on_reader_gone`, once. Nothing is raised, so that the program can end in
    an orderly way. Not to be created while rich has redirected the stream.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """None: the program was started with that output closed."""
        super().__init__()
        self._stream = stream
        self.reader_gone = False
        self.error: OSError | None = None
        """The error of a failed write that is not due to the reader, such as a full disk."""
        self.on_reader_gone: Callable[[], object] = lambda: None

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Encoding of the text."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """The file descriptor. Raises OSError if there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("closed")
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        """Writes text, unless the reader is gone."""
        if self._stream is not None and not self.reader_gone:
            try:
                self._stream.write(text)
            except OSError as error:
                self.stop_writing(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, unless the reader is gone."""
        if self._stream is not None and not self.reader_gone:
            try:
                self._stream.flush()
            except OSError as error:
                self.stop_writing(error)

    def reader_has_left(self) -> bool:
        """Whether it is a pipe whose reader has closed it."""
        try:
            descriptor = self.fileno()
        except OSError:
            return False
        asked = select.poll()
        asked.register(descriptor, 0)
        return any(what & select.POLLERR for _, what in asked.poll(0))

    def print_line(self, document: dict[str, Any]) -> None:
        """Prints a JSON object on one line, and flushes."""
        self.write(json.dumps(document, ensure_ascii=True) + "\n")
        self.flush()

    def console(self) -> Console:
        """A console that writes here."""
        return OutputConsole(file=cast(IO[str], self))

    def stop_writing(self, error: OSError) -> None:
        """Discards all further output after a failed write."""
        self.reader_gone = True
        self.error = None if isinstance(error, BrokenPipeError) else error
        # The interpreter writes the rest of the stream's buffer when it ends, which must not fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self.fileno())
        finally:
            os.close(nowhere)
        self.on_reader_gone()


def standard_output() -> Pipe:
    """This process' current standard output."""
    return Pipe(sys.stdout)


def standard_error() -> Pipe:
    """This process' current standard error."""
    return Pipe(sys.stderr)
