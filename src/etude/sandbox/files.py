"""File operations over a sandbox's channel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from etude.errors import AgentError
from etude.kit.durable import whole_file
from etude.sandbox.answers import Shapes, nonsense, rows
from etude.sandbox.channel import Answer
from etude.sandbox.errors import PathKindError, SandboxKilledByAgentError, fault_error
from etude.sandbox.host_paths import below, files_of, name_below
from etude.sandbox.inside import faults
from etude.sandbox.inside.frames import Header
from etude.sandbox.paths import normal_path
from etude.sandbox.types import FileInfo, GrepMatch

PIECE_BYTES = 4 << 20
"""Files travel in pieces of this size."""
DOWNLOAD_BYTES = 1 << 30
"""The most that a download brings: what is sparse, or has many names, takes more here than in its sandbox."""
_NAMES_BYTES = 8 << 20
"""Paths that one request holds, as they may stand in its header."""
_MAX_DEPTH = 100
_ENTRY: Shapes = frozenset({(str, str, int)})
_MATCH: Shapes = frozenset({(str, int, str)})


def name_bytes(path: str) -> int:
    """The most that a path takes in a header, with its file's size beside it."""
    return 6 * len(path) + 32


def batches(sizes: Sequence[int], limit_bytes: int) -> Iterator[slice]:
    """Consecutive runs of which each adds up to at most `limit_bytes`, or holds one item that is larger."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit_bytes:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


async def read_each(
    read: Callable[[str, int], Awaitable[bytes]], paths: Sequence[str], limit_bytes: int
) -> list[bytes | AgentError]:
    """`Files.read_many` for files that can only be read one by one: all at the same time."""

    async def outcome(path: str) -> bytes | AgentError:
        try:
            return await read(path, limit_bytes)
        except SandboxKilledByAgentError:
            raise
        except AgentError as error:
            return error

    return await asyncio.gather(*map(outcome, paths))


class Line(Protocol):
    """What file operations need of their sandbox."""

    @property
    def workspace(self) -> str: ...

    async def call(self, header: Header, payload: bytes = b"", path: str | None = None) -> Answer: ...


class ChannelFiles:
    """`Files` over a sandbox's channel."""

    def __init__(self, line: Line, sandbox: str = "") -> None:
        """`sandbox`: its id, which errors name."""
        self._line = line
        self._sandbox = sandbox

    async def read(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See Files.read."""
        header: Header = {"op": "read", "path": self._normal(path), "limit_bytes": limit_bytes}
        data = (await self._line.call(header, b"", path))[1]
        self._check_size(data, limit_bytes)
        return data

    async def read_many(self, paths: Sequence[str], limit_bytes: int = 1 << 20) -> list[bytes | AgentError]:
        """See Files.read_many. Mostly in one round trip."""
        found: list[bytes | AgentError] = []
        while len(found) < len(paths):
            found += await self._read_some(paths[len(found) :], limit_bytes)
        return found

    async def _read_some(self, paths: Sequence[str], limit_bytes: int) -> list[bytes | AgentError]:
        """As `read_many`, of the first path and of as many after it as one answer holds.

        A program inside of an older version answers for the first one only.
        """
        if len(paths) > 1:
            try:
                names = [self._normal(path) for path in paths]
                header: Header = {"op": "read", "path": names[0], "limit_bytes": limit_bytes}
                answer, data = await self._line.call({**header, "more": names[1:]})
                if "files" in answer:
                    return self._shared(answer["files"], data, paths, limit_bytes)
                self._check_size(data, limit_bytes)
                return [data]
            except SandboxKilledByAgentError:
                raise
            except AgentError:
                # A path that is none, or an answer for which memory did not suffice: the first is asked for
                # alone, and tells the truth about itself.
                pass
        return await read_each(self.read, paths[:1], limit_bytes)

    def _shared(
        self, answered: Any, data: bytes, paths: Sequence[str], limit_bytes: int
    ) -> list[bytes | AgentError]:
        """What an answer holds of the first files: of each a size, or a fault. Raises SandboxError."""
        if type(answered) is not list or not 0 < len(answered) <= len(paths):
            raise nonsense(self._sandbox, "files", answered, f"1 to {len(paths)} sizes or faults")
        found: list[bytes | AgentError] = []
        start = 0
        for path, row in zip(paths, answered, strict=False):
            if type(row) is int and 0 <= row <= max(0, limit_bytes):
                found.append(data[start : start + row])
                start += row
            elif type(row) is list and list(map(type, row)) == [str, str]:
                found.append(fault_error((row[0], row[1]), "path", path))
            else:
                raise nonsense(self._sandbox, "files", row, f"a size up to {limit_bytes}, or a fault")
        if start != len(data):
            raise nonsense(self._sandbox, "files", start, f"files of {len(data)} bytes together")
        return found

    async def write(self, path: str, data: str | bytes) -> None:
        """See Files.write."""
        await self.write_many({path: data})

    async def write_many(self, files: Mapping[str, str | bytes]) -> None:
        """See Files.write_many."""
        contents = [data.encode() if isinstance(data, str) else data for data in files.values()]
        pieces = [[self._normal(path), len(data)] for path, data in zip(files, contents, strict=True)]
        received = next(iter(files)) if len(files) == 1 else None
        for part in batches([name_bytes(path) for path in files], _NAMES_BYTES):
            header: Header = {"op": "write", "files": pieces[part]}
            await self._line.call(header, b"".join(contents[part]), received)

    async def list(self, path: str = ".", depth: int = 1) -> list[FileInfo]:
        """See Files.list."""
        header: Header = {"op": "list", "path": self._normal(path), "depth": depth}
        answer, _ = await self._line.call(header, b"", path)
        return [FileInfo(*row) for row in rows(answer, "entries", self._sandbox, _ENTRY)]

    async def remove(self, path: str) -> None:
        """See Files.remove."""
        await self._line.call({"op": "remove", "path": self._normal(path)}, b"", path)

    async def grep(self, pattern: str, path: str = ".", limit: int = 50) -> list[GrepMatch]:
        """See Files.grep."""
        header: Header = {"op": "grep", "pattern": pattern, "path": self._normal(path), "limit": limit}
        answer, _ = await self._line.call(header, b"", path)
        return [GrepMatch(*row) for row in rows(answer, "matches", self._sandbox, _MATCH)]

    async def upload(self, source: Path, path: str) -> int:
        """See Files.upload."""
        total = 0
        for file, name in await asyncio.to_thread(files_of, source):
            total += await self._upload_file(file, f"{path}/{name}" if name else path)
        return total

    async def _upload_file(self, source: Path, path: str) -> int:
        name = self._normal(path)
        total = 0
        with source.open("rb") as file:
            while True:
                piece = await asyncio.to_thread(file.read, PIECE_BYTES)
                if total and not piece:
                    return total
                header: Header = {"op": "write", "files": [[name, len(piece)]], "append": total > 0}
                await self._line.call(header, piece, path)
                total += len(piece)
                if len(piece) < PIECE_BYTES:
                    return total

    async def download(self, path: str, target: Path) -> int:
        """See Files.download."""
        try:
            entries = await self.list(path, _MAX_DEPTH)
        except PathKindError:
            return await self._download_file(path, target, DOWNLOAD_BYTES)
        name = self._normal(path)
        if sum(entry.size_bytes for entry in entries) > DOWNLOAD_BYTES:
            raise fault_error(faults.ANSWER_TOO_LARGE, "path", path)
        total = 0
        for entry in entries:
            if entry.kind == "file":
                place = below(target, name_below(entry.path, name))
                total += await self._download_file(entry.path, place, DOWNLOAD_BYTES - total)
        await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
        return total

    async def _download_file(self, path: str, target: Path, room_bytes: int) -> int:
        """Writes beside the target and renames: a link in its place is replaced, never followed."""
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        offset = 0
        with whole_file(target, sync=False) as file:
            while True:
                header: Header = {"op": "read", "path": self._normal(path), "limit_bytes": PIECE_BYTES}
                piece = (await self._line.call({**header, "offset": offset}, b"", path))[1]
                self._check_size(piece, PIECE_BYTES)
                if offset + len(piece) > room_bytes:
                    raise fault_error(faults.ANSWER_TOO_LARGE, "path", path)
                await asyncio.to_thread(file.write, piece)
                offset += len(piece)
                if len(piece) < PIECE_BYTES:
                    return offset

    def _check_size(self, data: bytes, limit_bytes: int) -> None:
        if len(data) > max(0, limit_bytes):
            raise nonsense(self._sandbox, "payload", len(data), f"at most {limit_bytes} bytes")

    def _normal(self, path: str) -> str:
        return normal_path(path, self._line.workspace)
