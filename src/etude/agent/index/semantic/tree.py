"""Trees of files that can be indexed: a directory, or a mapping in memory."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from blake3 import blake3

from etude.errors import ResourceError

__all__ = ["DirectoryTree", "FileStat", "MappingTree", "Tree"]

MAX_FILE_BYTES = 1 << 20
"""Larger files are data or generated; they are not indexed."""
_GIT_TIMEOUT_S = 120.0


class FileStat(NamedTuple):
    """What tells cheaply that a file is the one that was read: git's rule."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @property
    def newest_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)


class Tree(Protocol):
    """Regular files by path relative to the root, with "/" between names."""

    @property
    def key(self) -> str:
        """Names the tree in a store: its next update starts from what is known of this name."""
        ...

    def scan(self) -> Iterator[tuple[str, FileStat]]:
        """All files to index, in any order. Blocks."""
        ...

    def read(self, path: str) -> bytes | None:
        """A file's bytes; None if it is gone or may not be read. Blocks."""
        ...


class DirectoryTree:
    """A directory on this machine.

    In a git work tree the files that git knows or does not ignore; elsewhere all but hidden ones. `files`
    gives relative paths instead. Symbolic links, special files and files above `MAX_FILE_BYTES` are left out.

    Raises `ResourceError` if the root is no directory, or git fails.
    """

    def __init__(self, root: Path, files: Callable[[], Iterable[str]] | None = None) -> None:
        if not root.is_dir():
            raise ResourceError("there is no such directory to index", field="root", received=str(root))
        self._root = root.resolve()
        self._files = files

    @property
    def key(self) -> str:
        return f"directory:{self._root}"

    def scan(self) -> Iterator[tuple[str, FileStat]]:
        for path in self._paths():
            try:
                found = (self._root / path).lstat()
            except OSError:
                continue  # It went away since it was listed: it is not part of the tree.
            if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_FILE_BYTES:
                yield path, FileStat(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def read(self, path: str) -> bytes | None:
        try:
            descriptor = os.open(
                self._root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            try:
                content = file.read(MAX_FILE_BYTES + 1)
            except OSError:
                return None
        return content if len(content) <= MAX_FILE_BYTES else None

    def _paths(self) -> Iterable[str]:
        if self._files is not None:
            return sorted(set(self._files()))
        if (self._root / ".git").exists():
            return self._git_paths()
        return self._walk()

    def _walk(self) -> Iterator[str]:
        for folder, names, files in os.walk(self._root):
            names[:] = sorted(name for name in names if not name.startswith("."))
            inside = Path(folder).relative_to(self._root)
            yield from ((inside / name).as_posix() for name in sorted(files) if not name.startswith("."))

    def _git_paths(self) -> list[str]:
        """What git would list; a submodule's files are not among them."""
        command = [
            "git",
            "-C",
            str(self._root),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or str(error).encode()
            raise ResourceError(
                f"git cannot list the files to index: {told.decode('utf-8', 'replace').strip()[:500]}",
                field="root",
                received=str(self._root),
                fix="repair the repository, or pass files=",
            ) from error
        return sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})


class MappingTree:
    """Files in memory: for tests, and for states that lie in no directory, such as a commit."""

    def __init__(self, key: str, files: Mapping[str, bytes]) -> None:
        self._key = key
        self.files = dict(files)
        self.num_reads = 0
        """Files read so far."""

    @property
    def key(self) -> str:
        return f"mapping:{self._key}"

    def scan(self) -> Iterator[tuple[str, FileStat]]:
        for path, content in self.files.items():
            # The content's own digest stands where a file system has times: equal numbers mean equal bytes.
            digest = blake3(content).digest(length=21)
            numbers = (int.from_bytes(digest[i : i + 7], "little") for i in (0, 7, 14))
            yield path, FileStat(len(content), *(-number for number in numbers))

    def read(self, path: str) -> bytes | None:
        self.num_reads += 1
        return self.files.get(path)
