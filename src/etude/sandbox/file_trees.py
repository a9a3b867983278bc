"""A file or a directory as a stream of frames, from one host's disk to another's.

    file    {"path", "last"} and a piece of the file; the path of a single file is empty
    end     {"num_files"}

Whoever receives it trusts no name in it: what climbs out of the target is refused, links are never
followed, and only a stream that came to its end is whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from etude.errors import ResourceError, SandboxError
from etude.sandbox.host_paths import below, files_of
from etude.sandbox.inside.frames import Header, pack

PIECE_BYTES = 1 << 20
"""The most that one frame carries of a file."""


async def pack_tree(source: Path) -> AsyncGenerator[bytes, None]:
    """Frames of a regular file (its path is empty), or of every regular file below a directory.

    Links are left out. Raises ToolArgumentError if there is nothing of that name.
    """
    files = await asyncio.to_thread(files_of, source)
    for file, name in files:
        async for frame in _pack_file(file, name):
            yield frame
    yield pack({"event": "end", "num_files": len(files)})


async def pack_bytes(content: bytes) -> AsyncGenerator[bytes, None]:
    """Frames of a single file of that content."""
    for start in range(0, max(1, len(content)), PIECE_BYTES):
        last = start + PIECE_BYTES >= len(content)
        yield pack({"event": "file", "path": "", "last": last}, content[start : start + PIECE_BYTES])
    yield pack({"event": "end", "num_files": 1})


async def _pack_file(file: Path, name: str) -> AsyncGenerator[bytes, None]:
    with await asyncio.to_thread(file.open, "rb") as stream:
        while True:
            piece = await asyncio.to_thread(stream.read, PIECE_BYTES)
            last = len(piece) < PIECE_BYTES
            yield pack({"event": "file", "path": name, "last": last}, piece)
            if last:
                return


@dataclass
class _Partial:
    """A file on its way, beside its place."""

    name: str
    stream: BinaryIO
    path: Path
    place: Path

    def discard(self) -> None:
        self.stream.close()
        self.path.unlink(missing_ok=True)


class TreeWriter:
    """Writes the frames of one file or tree to `target`, each file beside its place and then renamed.

    The files of a tree appear one by one; a single file appears when the stream came to its end. A context
    manager: what is not whole when it ends is removed.
    """

    def __init__(self, target: Path, single: bool = False) -> None:
        """`target`: where a single file goes, or the directory that a tree fills. `single`: a file only."""
        self._target = target
        self._single = single
        self._open: _Partial | None = None
        self.num_bytes = 0
        """Written so far."""
        self.num_files = 0
        self.is_whole = False
        """Whether the stream came to its end, and nothing of it was missing."""

    def __enter__(self) -> TreeWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._open is not None:
            self._open.discard()
            self._open = None

    def take(self, header: Header, piece: bytes) -> None:
        """One frame. Blocks on the disk.

        Raises PathOutsideError, SandboxError for a mixed-up stream, ResourceError for a disk that fails.
        """
        try:
            if header.get("event") == "file":
                self._write(header, piece)
            elif header.get("event") == "end":
                self._end(header)
        except OSError as error:
            raise ResourceError(
                f"cannot write what came: {error.strerror}",
                field="target",
                received=str(self._target),
                fix="name another place, or make room",
            ) from error

    def _write(self, header: Header, piece: bytes) -> None:
        name = header.get("path")
        if not isinstance(name, str) or (self._single and name):
            raise SandboxError("the other side sends no single file", field="path", received=repr(name))
        if self._open is None:
            self._open = self._begin(name)
        now = self._open
        if now.name != name or now.stream.closed:
            raise SandboxError("the files of the stream are mixed up", field="path", received=now.name)
        now.stream.write(piece)
        self.num_bytes += len(piece)
        if header.get("last"):
            now.stream.close()
            self.num_files += 1
            if name:
                now.path.replace(now.place)
                self._open = None

    def _end(self, header: Header) -> None:
        now = self._open
        self.is_whole = header.get("num_files") == self.num_files and (now is None or now.stream.closed)
        if self.is_whole and now is not None:
            now.path.replace(now.place)
            self._open = None

    def _begin(self, name: str) -> _Partial:
        place = below(self._target, name) if name else self._target
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.part")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        return _Partial(name, os.fdopen(descriptor, "wb"), partial, place)
