"""A file as a stream of frames, from one host's disk to another's.

    piece   and bytes of the file
    end     {"num_bytes"}: of all pieces together

Only a stream that came to its end is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import BinaryIO

from etude.errors import ResourceError
from etude.kit.durable import whole_file
from etude.sandbox.inside.frames import Header, pack

PIECE_BYTES = 1 << 20
"""The most that one frame carries."""


async def pack_file(source: Path) -> AsyncGenerator[bytes, None]:
    """The frames of a file."""
    num_bytes = 0
    with await asyncio.to_thread(source.open, "rb") as stream:
        while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
            yield pack({"event": "piece"}, piece)
            num_bytes += len(piece)
    yield pack({"event": "end", "num_bytes": num_bytes})


class FileWriter:
    """Writes the pieces of one stream."""

    def __init__(self, file: BinaryIO, target: Path) -> None:
        self._file = file
        self._target = target
        self.num_bytes = 0
        """Written so far."""
        self.is_whole = False
        """Whether the stream came to its end, and nothing of it was missing."""

    def take(self, header: Header, piece: bytes) -> None:
        """One frame. Blocks on the disk. Raises ResourceError for a disk that fails."""
        if header.get("event") == "piece":
            with _disk_errors(self._target):
                self._file.write(piece)
            self.num_bytes += len(piece)
        self.is_whole = header.get("event") == "end" and header.get("num_bytes") == self.num_bytes


@contextlib.contextmanager
def receive_file(target: Path) -> Iterator[FileWriter]:
    """A writer whose file becomes `target` when the block ends; nothing stays of it where the block raises,
    as it must for a stream that is not whole. Raises ResourceError."""
    with contextlib.ExitStack() as stack:
        with _disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(whole_file(target, sync=False))
        yield FileWriter(file, target)


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write what came: {error.strerror}",
            field="target",
            received=str(target),
            fix="name another place, or make room",
        ) from error
