"""A small directory in which some files of a tree stand at their paths, among the tree's ignore rules.

So ripgrep itself can say which of them count and what matches in them, without a look at the rest of the
tree. The directory repeats the tree's own path, because rules of the directories above it count as well.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from etude.agent.index.grep.tree import GIT_EXCLUDE, IGNORE_NAMES

__all__ = ["Mirror"]


class Mirror:
    """One such directory, removed by `close`. All paths are relative to the tree's root."""

    def __init__(self, root: Path, rules: Iterable[bytes]) -> None:
        self._root = root
        self._top = Path(tempfile.mkdtemp(prefix="etude-grep-"))
        self._spool = self._top / "spool"
        self.path = self._top / "tree" / root.relative_to(root.anchor)
        try:
            self._spool.mkdir()
            self.path.mkdir(parents=True)
            for above in root.parents:
                self._copy_rules_above(above)
            for rule in rules:
                self.link(rule)
        except BaseException:
            self.close()
            raise

    def _copy_rules_above(self, directory: Path) -> None:
        target = self._top / "tree" / directory.relative_to(directory.anchor)
        for name in map(os.fsdecode, IGNORE_NAMES):
            if (directory / name).is_file():
                (target / name).symlink_to(directory / name)
        if (directory / ".git").exists():
            _link_git(directory / ".git", target / ".git")

    def put(self, path: bytes, content: bytes) -> None:
        """A file with this content; a search meanwhile sees the old one or this."""
        waiting = self._spool / "next"
        waiting.write_bytes(content)
        waiting.replace(self._place(path))

    def link(self, path: bytes) -> None:
        """The tree's own file at `path`, read when it is searched."""
        self.link_to(path, self._root / os.fsdecode(path))

    def link_to(self, path: bytes, source: Path) -> None:
        """Another file in the place of `path`."""
        target = self._place(path)
        if target.name == ".git":
            _link_git(source, target)
        else:
            target.symlink_to(source)

    def make_directory(self, path: bytes) -> None:
        """An empty directory, if none is there."""
        target = self.path / os.fsdecode(path)
        if not target.is_dir() or target.is_symlink():
            self._place(path).mkdir()

    def link_many(self, paths: Iterable[bytes]) -> None:
        """The tree's own files at `paths`, where nothing stands yet."""
        top, root = os.fsencode(self.path), os.fsencode(self._root)
        made: set[bytes] = set()
        for path in paths:
            directory = top + b"/" + path.rpartition(b"/")[0]
            if directory not in made:
                os.makedirs(directory, exist_ok=True)  # noqa: PTH103  a hundred thousand times
                made.add(directory)
            os.symlink(root + b"/" + path, top + b"/" + path)  # noqa: PTH211  paths are bytes

    def is_directory(self, path: bytes) -> bool:
        """Whether `path` is a directory here."""
        target = self.path / os.fsdecode(path)
        return target.is_dir() and not target.is_symlink()

    def move(self, old: bytes, new: bytes) -> None:
        """A file that is here."""
        (self.path / os.fsdecode(old)).replace(self._place(new))

    def remove(self, path: bytes) -> None:
        """Whatever is at `path`, with all below it."""
        target = self.path / os.fsdecode(path)
        if target.is_symlink() or target.is_file():
            target.unlink()
        elif target.is_dir():
            shutil.rmtree(target)

    def _place(self, path: bytes) -> Path:
        """Room for a file: nothing stands at `path`, and directories lead to it."""
        target = self.path / os.fsdecode(path)
        if target.is_symlink() or target.exists():
            self.remove(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):  # a file was where a directory is now
            for above in reversed(target.parents[: len(target.relative_to(self.path).parts) - 1]):
                if above.is_symlink() or above.is_file():
                    above.unlink()
            target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def close(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self._top, ignore_errors=True)


def _link_git(source: Path, target: Path) -> None:
    """Enough of a repository for ripgrep to know one: that it is there, and what it excludes."""
    if source.is_dir():
        (target / "info").mkdir(parents=True, exist_ok=True)
        exclude = source / os.fsdecode(GIT_EXCLUDE).removeprefix(".git/")
        if exclude.is_file() and not (target / "info" / "exclude").is_symlink():
            (target / "info" / "exclude").symlink_to(exclude)
    else:
        target.symlink_to(source)
