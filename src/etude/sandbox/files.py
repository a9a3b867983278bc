"""Reading, writing and transferring the files of a sandbox's workspace."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import AgentError, ToolArgumentError
from etude.kit.durable import whole_file
from etude.sandbox.answers import Shapes, invalid_answer, rows
from etude.sandbox.errors import PathKindError, PathOutsideError, SandboxKilledByAgentError, fault_error
from etude.sandbox.inside import faults
from etude.sandbox.inside.frames import Header
from etude.sandbox.types import FileInfo, GrepMatch

if TYPE_CHECKING:
    from etude.sandbox.interface import Sandbox

PIECE_BYTES = 4 << 20
"""Files travel in pieces of this size."""
DOWNLOAD_BYTES = 1 << 30
"""Most bytes of a download: sparse files and hard links take more space here than in the sandbox."""
_NAMES_BYTES = 8 << 20
"""Most bytes of encoded paths in one request's header."""
_MAX_DEPTH = 100
_ENTRY: Shapes = frozenset({(str, str, int)})
_MATCH: Shapes = frozenset({(str, int, str)})


def name_bytes(path: str) -> int:
    """Upper bound of the bytes that a path takes in a header, together with its file's size."""
    return 6 * len(path) + 32


def batches(sizes: Sequence[int], limit_bytes: int) -> Iterator[slice]:
    """Splits sizes into consecutive batches of at most `limit_bytes`; a larger item is a batch of its own."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit_bytes:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def split_write(header: Header, payload: bytes, limit_bytes: int) -> Iterator[tuple[Header, bytes]]:
    """Splits a `write` into calls of at most `limit_bytes` each; a larger file is written in pieces."""
    files, start = header["files"], 0
    for part in batches([size + name_bytes(path) for path, size in files], limit_bytes):
        rows = files[part]
        end = start + sum(size for _, size in rows)
        if end - start <= limit_bytes:
            yield {**header, "files": rows}, payload[start:end]
        else:
            for begin in range(start, end, limit_bytes):
                piece = payload[begin : min(begin + limit_bytes, end)]
                append = bool(header.get("append")) or begin > start
                yield {**header, "files": [[rows[0][0], len(piece)]], "append": append}, piece
        start = end


class Files:
    """File operations in the workspace. Symbolic links that lead out of the workspace are refused."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def read(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """The first `limit_bytes` of a file. Raises PathMissingError, PathKindError, PathOutsideError."""
        return await self._read({"op": "read", "path": path, "limit_bytes": limit_bytes})

    async def _read(self, header: Header) -> bytes:
        data = (await self._sandbox.call(header))[1]
        self._check_size(data, header["limit_bytes"])
        return data

    async def read_many(self, paths: Sequence[str], limit_bytes: int = 1 << 20) -> list[bytes | AgentError]:
        """The first `limit_bytes` of each file, or the error that `read` would raise; in few round trips.

        Raises SandboxError.
        """
        found: list[bytes | AgentError] = []
        while len(found) < len(paths):
            found += await self._read_some(paths[len(found) :], limit_bytes)
        return found

    async def _read_some(self, paths: Sequence[str], limit_bytes: int) -> list[bytes | AgentError]:
        """As `read_many`, for the first path and as many after it as fit into one answer.

        An older version of the program inside answers for the first one only.
        """
        header: Header = {"op": "read", "path": paths[0], "limit_bytes": limit_bytes}
        if len(paths) > 1:
            try:
                answer, data = await self._sandbox.call({**header, "more": list(paths[1:])})
                if "files" in answer:
                    return self._shared(answer["files"], data, paths, limit_bytes)
                self._check_size(data, limit_bytes)
                return [data]
            except SandboxKilledByAgentError:
                raise
            except AgentError:
                # An invalid path, or an answer too large for memory: the first path is read alone, and
                # returns its own error.
                pass
        try:
            return [await self._read(header)]
        except SandboxKilledByAgentError:
            raise
        except AgentError as error:
            return [error]

    def _shared(
        self, answered: Any, data: bytes, paths: Sequence[str], limit_bytes: int
    ) -> list[bytes | AgentError]:
        """The contents or faults of the first files in an answer. Raises SandboxKilledByAgentError."""
        if type(answered) is not list or not 0 < len(answered) <= len(paths):
            raise invalid_answer(self._sandbox.id, "files", answered, f"1 to {len(paths)} sizes or faults")
        found: list[bytes | AgentError] = []
        start = 0
        for path, row in zip(paths, answered, strict=False):
            if type(row) is int and 0 <= row <= max(0, limit_bytes):
                found.append(data[start : start + row])
                start += row
            elif type(row) is list and list(map(type, row)) == [str, str]:
                found.append(fault_error((row[0], row[1]), "path", path))
            else:
                raise invalid_answer(
                    self._sandbox.id, "files", row, f"a size up to {limit_bytes}, or a fault"
                )
        if start != len(data):
            raise invalid_answer(self._sandbox.id, "files", start, f"files of {len(data)} bytes together")
        return found

    async def write(self, path: str, data: str | bytes) -> None:
        """Replaces or creates a file and its parent directories. Raises as `read`, and DiskFullError."""
        await self.write_many({path: data})

    async def write_many(self, files: Mapping[str, str | bytes]) -> None:
        """Writes several files in one round trip, in order; files before a failure stay written."""
        contents = [data.encode() if isinstance(data, str) else data for data in files.values()]
        pieces = [[path, len(data)] for path, data in zip(files, contents, strict=True)]
        for part in batches([name_bytes(path) for path in files], _NAMES_BYTES):
            await self._sandbox.call({"op": "write", "files": pieces[part]}, b"".join(contents[part]))

    async def list(self, path: str = ".", depth: int = 1) -> list[FileInfo]:
        """Entries below a directory down to `depth` levels, sorted by path. Links are not followed."""
        answer, _ = await self._sandbox.call({"op": "list", "path": path, "depth": depth})
        return [FileInfo(*row) for row in rows(answer, "entries", self._sandbox.id, _ENTRY)]

    async def remove(self, path: str) -> None:
        """Removes a file, or a directory with its contents; the workspace itself is refused."""
        await self._sandbox.call({"op": "remove", "path": path})

    async def grep(self, pattern: str, path: str = ".", limit: int = 50) -> list[GrepMatch]:
        """Lines that a Python regular expression matches, in the order of sorted paths.

        Skips files with NUL bytes and `__pycache__`. Raises ToolArgumentError for a pattern that does not
        compile or takes too long.
        """
        header: Header = {"op": "grep", "pattern": pattern, "path": path, "limit": limit}
        answer, _ = await self._sandbox.call(header)
        return [GrepMatch(*row) for row in rows(answer, "matches", self._sandbox.id, _MATCH)]

    async def upload(self, source: Path, path: str) -> int:
        """Copies a host file, or a directory with its regular files, to `path`; returns the bytes copied.

        Sent in pieces, so the size is not limited. Skips symbolic links below `source`. Raises as `write`.
        """
        total = 0
        for file, name in await asyncio.to_thread(files_of, source):
            total += await self._upload_file(file, f"{path}/{name}" if name else path)
        return total

    async def _upload_file(self, source: Path, path: str) -> int:
        total = 0
        with source.open("rb") as file:
            while True:
                piece = await asyncio.to_thread(file.read, PIECE_BYTES)
                if total and not piece:
                    return total
                header: Header = {"op": "write", "files": [[path, len(piece)]], "append": total > 0}
                await self._sandbox.call(header, piece)
                total += len(piece)
                if len(piece) < PIECE_BYTES:
                    return total

    async def download(self, path: str, target: Path) -> int:
        """Copies a file or directory of the workspace to the host; returns the bytes copied.

        Whatever the sandbox answers, nothing outside `target` is written: names that lead out of it are
        refused, links are not followed. Raises as `read`.
        """
        try:
            entries = await self.list(path, _MAX_DEPTH)
        except PathKindError:
            return await self._download_file(path, target, DOWNLOAD_BYTES)
        if sum(entry.size_bytes for entry in entries) > DOWNLOAD_BYTES:
            raise fault_error(faults.ANSWER_TOO_LARGE, "path", path)
        # The topmost entries lie in the listed directory itself, so their parent is its name.
        top = min((entry.path for entry in entries), key=lambda name: name.count("/"), default="")
        folder = top.rpartition("/")[0] or "."
        total = 0
        for entry in entries:
            if entry.kind == "file":
                place = below(target, name_below(entry.path, folder))
                total += await self._download_file(entry.path, place, DOWNLOAD_BYTES - total)
        await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
        return total

    async def _download_file(self, path: str, target: Path, room_bytes: int) -> int:
        """Writes a temporary file and renames it over the target: a link there is replaced, not followed."""
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        header: Header = {"op": "read", "path": path, "limit_bytes": PIECE_BYTES}
        offset = 0
        with whole_file(target, sync=False) as file:
            while True:
                piece = await self._read({**header, "offset": offset})
                if offset + len(piece) > room_bytes:
                    raise fault_error(faults.ANSWER_TOO_LARGE, "path", path)
                await asyncio.to_thread(file.write, piece)
                offset += len(piece)
                if len(piece) < PIECE_BYTES:
                    return offset

    def _check_size(self, data: bytes, limit_bytes: int) -> None:
        if len(data) > max(0, limit_bytes):
            raise invalid_answer(self._sandbox.id, "payload", len(data), f"at most {limit_bytes} bytes")


def files_of(source: Path) -> list[tuple[Path, str]]:
    """(file, its path relative to the source) of all files to copy; the path is "" if the source is a file.

    Skips symbolic links. Raises ToolArgumentError if the source does not exist.
    """
    if source.is_dir():
        return [(file, file.relative_to(source).as_posix()) for file in _regular(source)]
    if source.is_file():
        return [(source, "")]
    raise ToolArgumentError(
        "no such file or directory", field="source", received=str(source), fix="name one that exists"
    )


def below(target: Path, name: str) -> Path:
    """Resolves an untrusted relative path below `target`. Raises PathOutsideError."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise PathOutsideError("the sender names a path outside the target", field="path", received=name)
    path = target
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise PathOutsideError("the path holds a symbolic link", field="target", received=str(path))
    return path / parts[-1]


def name_below(path: str, folder: str) -> str:
    """A listed path relative to the listed folder; "" if it is not in it."""
    prefix = "" if folder == "." else folder + "/"
    return path[len(prefix) :] if path.startswith(prefix) else ""


def _regular(directory: Path) -> Iterator[Path]:
    """Regular files below a directory, sorted; links are not followed."""
    for folder, names, files in os.walk(directory):
        names.sort()
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path
