"""Files in a dict: the workspace of the in-memory backend."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.errors import AgentError
from etude.sandbox.errors import fault_error
from etude.sandbox.files import read_each
from etude.sandbox.host_paths import below, files_of, name_below
from etude.sandbox.inside import faults
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.filesystem import compile_pattern, matching_lines
from etude.sandbox.paths import WORKSPACE, normal_path
from etude.sandbox.types import FileInfo, GrepMatch


class MemoryFiles:
    """`Files` over a dict of path -> content. As on a disk, a directory outlives its last file."""

    def __init__(
        self, contents: dict[str, bytes], template: Mapping[str, bytes], workspace: str = WORKSPACE
    ) -> None:
        self.contents = contents
        self._workspace = workspace
        self.folders = {folder for path in (*template, *contents) for folder in _folders(path)}

    async def read(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        return self._content(normal_path(path, self._workspace), path)[:limit_bytes]

    async def read_many(
        self, paths: Sequence[str], limit_bytes: int = 1 << 20
    ) -> builtins.list[bytes | AgentError]:
        return await read_each(self.read, paths, limit_bytes)

    async def write(self, path: str, data: str | bytes) -> None:
        name = normal_path(path, self._workspace)
        if self.is_dir(name):
            raise fault_error(faults.IS_DIRECTORY, "path", path)
        folders = _folders(name)
        if any(folder in self.contents for folder in folders):
            raise fault_error(faults.PART_IS_FILE, "path", path)
        self.folders.update(folders)
        self.contents[name] = data.encode() if isinstance(data, str) else bytes(data)

    async def write_many(self, files: Mapping[str, str | bytes]) -> None:
        for path, data in files.items():
            await self.write(path, data)

    async def list(self, path: str = ".", depth: int = 1) -> list[FileInfo]:
        name = normal_path(path, self._workspace)
        if name in self.contents:
            raise fault_error(faults.NOT_DIRECTORY, "path", path)
        if not self.is_dir(name):
            raise self._nothing_there(name, path)
        prefix = "" if name == "." else name + "/"
        entries = [FileInfo(file, "file", len(data)) for file, data in self.contents.items()]
        entries += [FileInfo(folder, "dir", 0) for folder in self.folders]
        below = [
            entry
            for entry in entries
            if entry.path.startswith(prefix) and entry.path.count("/", len(prefix)) < depth
        ]
        return sorted(below, key=lambda entry: entry.path)

    async def remove(self, path: str) -> None:
        name = normal_path(path, self._workspace)
        if name == ".":
            raise fault_error(faults.ROOT_STAYS, "path", path)
        if name in self.contents:
            del self.contents[name]
            return
        if not self.is_dir(name):
            raise self._nothing_there(name, path)
        for file in [file for file in self.contents if file.startswith(name + "/")]:
            del self.contents[file]
        self.folders = {f for f in self.folders if f != name and not f.startswith(name + "/")}

    async def grep(self, pattern: str, path: str = ".", limit: int = 50) -> list[GrepMatch]:
        name = normal_path(path, self._workspace)
        try:
            expression = compile_pattern(pattern)
        except Fault as fault:
            raise fault_error((fault.kind, fault.message), "pattern", pattern) from fault
        if name not in self.contents and not self.is_dir(name):
            raise self._nothing_there(name, path)
        matches: list[GrepMatch] = []
        for file in sorted(self.contents):
            below = name in (".", file) or file.startswith(name + "/")
            if not below or "__pycache__" in file.split("/"):
                continue
            for number, line in matching_lines(expression, self.contents[file]):
                matches.append(GrepMatch(file, number, line))
                if len(matches) >= limit:
                    return matches
        return matches

    async def upload(self, source: Path, path: str) -> int:
        """See Files.upload."""
        total = 0
        for file, name in await asyncio.to_thread(files_of, source):
            data = await asyncio.to_thread(file.read_bytes)
            await self.write(f"{path}/{name}" if name else path, data)
            total += len(data)
        return total

    async def download(self, path: str, target: Path) -> int:
        """See Files.download."""
        name = normal_path(path, self._workspace)
        if name in self.contents:
            found = {target: self.contents[name]}
        else:
            entries = await self.list(path, 100)
            names = [entry.path for entry in entries if entry.kind == "file"]
            found = {below(target, name_below(file, name)): self.contents[file] for file in names}
        for file, data in found.items():
            await asyncio.to_thread(file.parent.mkdir, parents=True, exist_ok=True)
            await asyncio.to_thread(file.write_bytes, data)
        return sum(map(len, found.values()))

    def is_dir(self, path: str) -> bool:
        """Whether `path`, already normalised, is a directory."""
        return path == "." or path in self.folders

    def _nothing_there(self, name: str, path: str) -> AgentError:
        blocked = any(folder in self.contents for folder in _folders(name))
        return fault_error(faults.PART_IS_FILE if blocked else faults.MISSING, "path", path)

    def _content(self, name: str, path: str) -> bytes:
        data = self.contents.get(name)
        if data is None:
            if self.is_dir(name):
                raise fault_error(faults.IS_DIRECTORY, "path", path)
            raise self._nothing_there(name, path)
        return data


class MemorySource:
    """Workspace modules out of a dict."""

    def __init__(self, files: MemoryFiles) -> None:
        self._files = files

    def read(self, path: str) -> str | None:
        data = self._files.contents.get(path)
        return None if data is None else data.decode(errors="replace")

    def is_dir(self, path: str) -> bool:
        return self._files.is_dir(path)

    def entries(self, path: str) -> list[str]:
        prefix = path + "/" if path else ""
        names = {
            name[len(prefix) :].partition("/")[0] for name in self._files.contents if name.startswith(prefix)
        }
        return sorted(names)


def _folders(path: str) -> list[str]:
    """Every directory that `path` lies in."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
