"""Which files of a tree count: ripgrep decides, and what its decision rests on is noted beside it."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from etude.agent.index.grep.ripgrep import Output, Ripgrep, sort_key
from etude.errors import ConfigError, SandboxError

__all__ = [
    "GIT_EXCLUDE",
    "IGNORE_NAMES",
    "Statuses",
    "Tree",
    "is_rule_path",
    "list_files",
    "scan",
    "stat_file",
    "walk_flags",
]

IGNORE_NAMES = (b".gitignore", b".ignore", b".rgignore")
GIT_EXCLUDE = b".git/info/exclude"
_RULE_ENDINGS = (b"ignore", b".git", b"/exclude")
_DEADLINE_S = 600.0
_LOG_BYTES = 1 << 30
_IGNORING = re.compile(rb"ignoring \./(.*): Ignore\(")


Statuses = dict[bytes, os.stat_result]
"""Of regular files, by path."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The listing of one tree. Paths are relative to its root."""

    files: tuple[bytes, ...]
    """What `rg --files` lists, in the order of `rg --sort path`."""
    directories: frozenset[bytes]
    """Directories that ripgrep enters; the root is the empty path."""
    shadows: tuple[bytes, ...]
    """Entries beside them that it skips (hidden, ignored). A glob of a query may bring them back; what lies
    below a skipped directory it never sees."""
    rules: tuple[bytes, ...]
    """Ignore files and `.git` entries in those directories: what decided."""


def walk_flags(hidden: bool, no_ignore: bool) -> list[str]:
    """Ripgrep's flags for which files count."""
    return [*(["--hidden"] if hidden else []), *(["--no-ignore"] if no_ignore else [])]


def is_rule_path(path: bytes) -> bool:
    """Whether a change of `path` may change which other files count."""
    name = path.rpartition(b"/")[2]
    if name == b"exclude":
        return path == GIT_EXCLUDE or path.endswith(b"/" + GIT_EXCLUDE)
    return name == b".git" or name in IGNORE_NAMES


async def list_files(
    ripgrep: Ripgrep, root: Path, flags: Iterable[str] = (), *, follow: bool = False
) -> list[bytes]:
    """What `rg --files` lists below `root`, in no order. Raises SandboxError if it fails as a whole."""
    command = [
        "--no-config",
        "--no-messages",
        "--files",
        "--null",
        *(["--follow"] if follow else []),
        *flags,
        "./",
    ]
    output = await ripgrep.run(command, root, deadline_s=_DEADLINE_S, max_bytes=_LOG_BYTES)
    return _paths(output.stdout)


async def scan(
    ripgrep: Ripgrep, root: Path, flags: Iterable[str] = (), statuses: Statuses | None = None
) -> Tree:
    """Lists the tree, and takes into `statuses`, if given, that of every regular file in its directories.

    Raises ConfigError if `root` is no directory, SandboxError if ripgrep fails.
    """
    if not await asyncio.to_thread(root.is_dir):
        raise ConfigError(
            "is no directory", field="root", received=str(root), fix="name the root of a source tree"
        )
    # Its debugging log is the only place where ripgrep says what it skips. Where the log cannot be read, a
    # skipped directory is taken for one that was entered: more is then listed as a shadow, which costs time
    # and hides nothing.
    command = ["--no-config", "--debug", "--files", "--null", *flags, "./"]
    output = await ripgrep.run(
        command, root, deadline_s=_DEADLINE_S, max_bytes=_LOG_BYTES, max_error_bytes=_LOG_BYTES
    )
    if output.cut or output.status not in (0, 1, 2):
        raise SandboxError("ripgrep could not list the tree", field="root", received=str(root))
    return await asyncio.to_thread(_read_listing, root, output, statuses)


def _read_listing(root: Path, output: Output, statuses: Statuses | None) -> Tree:
    skipped = {match[1] for match in _IGNORING.finditer(output.stderr)}
    return _surroundings(root, sorted(_paths(output.stdout), key=sort_key), skipped, statuses)


def _paths(listing: bytes) -> list[bytes]:
    return [path.removeprefix(b"./") for path in listing.split(b"\0") if path]


def _surroundings(root: Path, files: list[bytes], skipped: set[bytes], statuses: Statuses | None) -> Tree:
    """Looks into each directory that holds a listed file, and into those that were entered for nothing."""
    listed = set(files)
    directories = _directories_of(files)
    queue = list(directories)
    shadows: list[bytes] = []
    rules: list[bytes] = []
    for directory in queue:
        for path, is_directory in _entries(root, directory, statuses):
            if path.endswith(_RULE_ENDINGS) and is_rule_path(path):  # hardly any: the first look is quick
                rules.append(path)
            if path in listed or path in directories:
                continue
            if is_directory and path not in skipped:
                directories.add(path)
                queue.append(path)
            else:
                shadows.append(path)
    if (root / os.fsdecode(GIT_EXCLUDE)).is_file():
        rules.append(GIT_EXCLUDE)
    return Tree(tuple(files), frozenset(directories), tuple(sorted(shadows)), tuple(sorted(rules)))


def _directories_of(files: Iterable[bytes]) -> set[bytes]:
    """All directories above the files, the root included. Each chain is climbed once only."""
    found = {b""}
    for parent in {path.rpartition(b"/")[0] for path in files}:
        directory = parent
        while directory not in found:
            found.add(directory)
            directory = directory.rpartition(b"/")[0]
    return found


def _entries(root: Path, directory: bytes, statuses: Statuses | None) -> list[tuple[bytes, bool]]:
    """Paths in one directory and whether each is a directory itself; none if it is gone or closed to us."""
    prefix = directory + b"/" if directory else b""
    found: list[tuple[bytes, bool]] = []
    try:
        with os.scandir(os.fsencode(root) + b"/" + directory) as entries:
            for entry in entries:
                path = prefix + entry.name
                found.append((path, entry.is_dir(follow_symlinks=False)))
                if statuses is not None and entry.is_file(follow_symlinks=False):
                    try:
                        statuses[path] = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # gone since it was listed
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return found


def stat_file(root: bytes, path: bytes) -> os.stat_result | None:
    """The status of a regular file; None if there is none at that path."""
    try:
        status = os.lstat(root + b"/" + path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None
