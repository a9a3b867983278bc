"""An append-only journal of JSON lines, each with its checksum, written by one process at a time.

    <checksum, hex> <space> <JSON object> <newline>

A line torn by a crash at the file's end is dropped by the next writer; damage anywhere else is an error.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import StoreError

Checksum = Callable[[bytes], str]
"""Maps a line's JSON to its checksum in hex."""


class LineJournal:
    """A journal open for appending and locked by this process. `append` hands a line to the operating system;
    `sync` makes all lines durable.

    Both raise StoreError if the file cannot be written or is closed, and on every later call: a line
    appended after half a line would damage the journal.
    """

    def __init__(self, path: Path, checksum: Checksum, flags: int = 0) -> None:
        """Use `create` or `resume`."""
        self.path = path
        self._checksum = checksum
        self._failed: StoreError | None = None
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(f"{path} was removed as it was opened")
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def create(cls, path: Path, checksum: Checksum) -> LineJournal:
        """Begins a journal. Raises FileExistsError, and other OSErrors."""
        return cls(path, checksum, os.O_CREAT | os.O_EXCL)

    @classmethod
    def resume(cls, path: Path, checksum: Checksum) -> tuple[LineJournal, list[dict[str, Any]]]:
        """Opens an existing journal for appending and returns its lines. A torn last line is cut off, unless
        the file has no whole line. Raises FileNotFoundError, BlockingIOError if another process has locked
        it, other OSErrors, and StoreError if it is damaged.
        """
        journal = cls(path, checksum)
        try:
            lines, length = read_lines(path, checksum)
            if lines:
                journal._file.truncate(length)
        except BaseException:
            journal.close()
            raise
        return journal, lines

    def append(self, document: Mapping[str, Any]) -> None:
        """Writes one line."""
        text = json.dumps(document, separators=(",", ":")).encode()
        line = b"%s %s\n" % (self._checksum(text).encode(), text)
        with self._sticky_errors():
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")

    def sync(self) -> None:
        """Waits until the appended lines are on the disk."""
        with self._sticky_errors():
            os.fdatasync(self._file.fileno())

    @contextmanager
    def _sticky_errors(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except (OSError, ValueError) as error:  # a ValueError: it is closed
            self._failed = StoreError(
                "the journal cannot be written", field=str(self.path), received=str(error),
                fix="free disk space",
            )  # fmt: skip
            raise self._failed from error

    def close(self) -> None:
        """Closes the file and releases its lock. Idempotent."""
        self._file.close()

    def remove(self) -> None:
        """Deletes the file and closes it. Idempotent."""
        self.path.unlink(missing_ok=True)
        self.close()


def read_lines(path: Path, checksum: Checksum) -> tuple[list[dict[str, Any]], int]:
    """All lines, and their length in bytes without a torn last one. Raises OSError; StoreError for damage."""
    data = path.read_bytes()
    documents: list[dict[str, Any]] = []
    position = 0
    while position < len(data):
        end = data.find(b"\n", position) + 1
        document = _document(data[position : end - 1], checksum) if end else None
        if document is None:
            if end and end < len(data):
                raise StoreError(
                    "the journal is damaged",
                    field=f"line {len(documents) + 1}",
                    received=str(path),
                    fix="move it to another directory",
                )
            break
        documents.append(document)
        position = end
    return documents, position


def _document(line: bytes, checksum: Checksum) -> dict[str, Any] | None:
    digest, _, text = line.partition(b" ")
    if digest.decode("latin-1") != checksum(text):
        return None
    document = json.loads(text)
    return document if isinstance(document, dict) else None
