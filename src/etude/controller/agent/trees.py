"""The files that a person works on: a directory, possibly overlaid by an editor's unsaved buffers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.errors import ConfigError, UserError
from etude.kit.durable import write_bytes
from etude.kit.git import git_fault, run_git

MAX_FILES = 20_000
MAX_BYTES = 128 << 20
"""Total of all files. A directory with more is refused."""
MAX_FILE_BYTES = 8 << 20
"""Larger files are left out, and reported."""
LEFT_OUT_NAMES = frozenset(
    [
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        ".pytest_cache",
        ".ruff_cache",
        ".mypy_cache",
        ".hypothesis",
        ".tox",
        ".nox",
        ".etude",
        ".DS_Store",
    ]
)
"""Files and folders that neither enter the sandbox nor come back from it."""
_GIT_S = 30.0


@dataclass(frozen=True, slots=True)
class _File:
    """A file's contents as read; valid as long as its stamp is unchanged."""

    stamp: tuple[int, int, int]
    data: bytes


class DirectoryTree:
    """The files of a directory, by their path relative to it, with `/` between its parts.

    In a git work tree git determines the files: those that it tracks and those that it does not ignore.
    Symbolic links are neither read nor written nor followed.
    """

    def __init__(self, root: Path) -> None:
        """Raises ConfigError if `root` is not a directory."""
        if not root.is_dir():
            raise ConfigError(
                "is not a directory", field="PATH", received=str(root), fix="name a directory that exists"
            )
        self.root = root.resolve()
        if self.root == Path(self.root.anchor):
            raise ConfigError(
                "is the root directory, which cannot be copied into a sandbox",
                field="PATH",
                received=str(root),
                fix="name the directory of one project: etude agent ~/project",
            )
        self.left_out: list[str] = []
        """Files that were too large at the last scan."""
        self._cached: dict[str, _File] = {}

    async def scan(self) -> dict[str, bytes]:
        """Current contents of all files; those that did not change since the last scan are not read again.

        Raises ConfigError for a directory that is missing or too large.
        """
        return await asyncio.to_thread(self._scan)

    async def read(self, path: str) -> bytes | None:
        """Current contents of one file; None if it does not exist or may not be read."""
        found = await asyncio.to_thread(self._read_file, path)
        return None if found is None else found.data

    async def write(self, path: str, data: bytes) -> None:
        """Writes one file, which keeps its permissions, and the folders above it. Raises UserError for a path
        that must not be written."""
        await asyncio.to_thread(self._write, path, data)

    async def remove(self, path: str) -> None:
        """Removes one file, and the folders above it that it leaves empty. Raises UserError."""
        await asyncio.to_thread(self._remove, path)

    async def occupied(self, path: str) -> bool:
        """Whether a path exists, even if `read` does not return it, such as a file that is too large."""
        place = await asyncio.to_thread(self._place, path)
        return place is not None and await asyncio.to_thread(place.exists)

    async def unwanted(self, paths: Iterable[str]) -> set[str]:
        """The paths among these that are not source: caches, and those that git would ignore.

        A directory is given with a slash at its end.
        """
        listed = list(paths)
        named = {path for path in listed if is_left_out(path)}
        rest = [path for path in listed if path not in named]
        if not rest:
            return named
        ignored = await asyncio.to_thread(_git, self.root, ("check-ignore", "-z", "--stdin"), rest)
        return named | set(ignored or ())

    def _scan(self) -> dict[str, bytes]:
        if not self.root.is_dir():
            raise ConfigError("does not exist", field="PATH", received=str(self.root), fix="name another")
        cached: dict[str, _File] = {}
        self.left_out = []
        total_bytes = 0
        for path in list_names(self.root):
            found = self._read_file(path)
            if found is None:
                continue
            cached[path] = found
            total_bytes += len(found.data)
            if total_bytes > MAX_BYTES or len(cached) > MAX_FILES:
                raise ConfigError(
                    f"holds more than {MAX_BYTES >> 20} MiB or {MAX_FILES:,} files",
                    field="PATH",
                    received=str(self.root),
                    fix="name a folder below it, or have git ignore what is not source"
                    if (self.root / ".git").exists()
                    else "name the directory of one project, or a folder below it",
                )
        self._cached = cached
        return {path: file.data for path, file in cached.items()}

    def _read_file(self, path: str) -> _File | None:
        place = self._place(path)
        if place is None:
            return None
        try:
            status = place.stat()
            if not place.is_file():
                return None
            if status.st_size > MAX_FILE_BYTES:
                self.left_out.append(path)
                return None
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._cached.get(path)
            return known if known is not None and known.stamp == stamp else _File(stamp, place.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(
                "cannot be read",
                field=path,
                received=str(error),
                fix="make it readable, have git ignore it, or name another directory",
            ) from error

    def _place(self, path: str) -> Path | None:
        """Absolute form of a path; None where it leaves the root or leads through a link."""
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            return None
        place = self.root
        for part in parts:
            place = place / part
            if place.is_symlink():
                return None
        return place

    def writable(self, path: str) -> Path:
        """Absolute form of a path to write. Raises UserError for a path that must not be written."""
        place = None if is_left_out(path) else self._place(path)
        if place is None or place.is_dir():
            raise UserError("is not a file that may be written", field="PATH", received=path)
        return place

    def _write(self, path: str, data: bytes) -> None:
        place = self.writable(path)
        try:
            mode = place.stat().st_mode & 0o7777 if place.exists() else None
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, data, mode)
        except OSError as error:
            raise UserError("cannot be written", field=path, received=str(error)) from error

    def _remove(self, path: str) -> None:
        place = self.writable(path)
        try:
            place.unlink(missing_ok=True)
        except OSError as error:
            raise UserError("cannot be removed", field=path, received=str(error)) from error
        with contextlib.suppress(OSError):
            while place.parent != self.root:
                place = place.parent
                place.rmdir()


def list_names(root: Path) -> list[str]:
    """Sorted names of a directory's files: as git lists them, else all that are not left out."""
    listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = _git(root, listing, ())
    return sorted({name for name in (_walk(root) if names is None else names) if not is_left_out(name)})


def is_left_out(path: str) -> bool:
    """Whether a part of the path has a name that never enters a sandbox."""
    return not LEFT_OUT_NAMES.isdisjoint(path.split("/"))


def is_test(path: str) -> bool:
    """Whether a file contains Python tests, by its name."""
    name = path.rsplit("/", 1)[-1]
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _walk(root: Path) -> list[str]:
    """Files below `root`, without folders that are left out anyway."""
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT_NAMES]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
        if len(found) > 4 * MAX_FILES:
            break
    return found


def _git(root: Path, arguments: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Runs git; returns its NUL-separated output as a list, None outside of a work tree, and in a directory
    that the repository around it ignores as a whole.

    Raises ConfigError where there is a work tree and git fails.
    """
    if _is_ignored(root):
        return None
    given = "\0".join(names).encode("utf-8", "surrogateescape")
    try:
        listed = run_git(root, *arguments, stdin=given, timeout_s=_GIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        if isinstance(error, subprocess.CalledProcessError) and error.returncode == 1:
            listed: bytes = error.stdout  # of check-ignore, which exits with 1 where nothing is ignored
        elif any((folder / ".git").exists() for folder in (root, *root.parents)):
            raise ConfigError(
                "is in a git work tree, but git cannot list the files that it ignores",
                field="PATH",
                received=git_fault(error),
                fix="fix the problem that git reports, or name a copy without .git",
            ) from error
        else:
            return None
    return [name for name in listed.decode("utf-8", "surrogateescape").split("\0") if name]


def _is_ignored(root: Path) -> bool:
    try:
        run_git(root, "check-ignore", "-q", ".", timeout_s=_GIT_S)
    except (OSError, subprocess.SubprocessError):
        return False  # exit status 1: not ignored; `_git` reports other failures
    return True
