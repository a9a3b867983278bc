"""The directory itself as the workspace: nothing is copied, and changes of the edit tools can be undone.

    a call begins --> record_originals of the files that it names --> it runs --> changes: compares them

Changes made by commands are not recorded, and cannot be undone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.controller.agent.changes import FileChange, TurnChange
from etude.controller.agent.mirror import CHANGED_MEANWHILE, Mirror
from etude.controller.agent.trees import LEFT_OUT_NAMES, MAX_FILE_BYTES, is_test, list_names
from etude.errors import AgentError, ConfigError
from etude.sandbox.template import Image, Template

NOT_UNDONE = "changes by commands, and to files above 8 MiB, cannot be undone: see git status"
MAX_TOUCHED_BYTES = 32 << 20
"""Most bytes of the files that are recorded before a call deletes a directory; else none are."""


@dataclass(slots=True, eq=False)
class InPlace(Mirror):
    """A Mirror without a copy: the sandbox works on the tree itself."""

    touched: dict[str, bytes | None] = field(default_factory=dict[str, "bytes | None"])
    """Original contents of the files that calls of this turn name."""

    async def load(self) -> None:
        """See Mirror. Reads nothing."""

    async def pull(self) -> list[str]:
        """See Mirror. Does nothing: the sandbox sees the person's changes already."""
        return []

    async def refresh(self, paths: Iterable[str]) -> None:
        """See Mirror. Does nothing, as `pull`."""

    async def roll_forward(self, change: TurnChange) -> None:
        """See Mirror. Does nothing: the changes are on disk."""

    def make_template(self, more: Mapping[str, bytes], image: Image | None) -> Template:
        """See Mirror."""
        return Template(name="repository", directory=str(self.tree.root), passed_over=LEFT_OUT_NAMES)

    def content(self, path: str) -> bytes:
        """See Mirror."""
        return _content(self.tree.root / path) or b""

    def test_paths(self) -> tuple[str, ...]:
        """See Mirror. Names alone are listed."""
        return tuple(path for path in list_names(self.tree.root) if is_test(path))

    def originals(self, before: Mapping[str, bytes | None]) -> None:
        """See Mirror. None: they were not read; the last commit has them."""

    def record_originals(self, paths: Iterable[str]) -> tuple[FileChange, ...]:
        """See Mirror."""
        for path in paths:
            for file in self._files_at(path):
                if (name := str(file.relative_to(self.tree.root))) not in self.touched:
                    try:
                        self.touched[name] = _content(file)
                    except OSError:
                        continue  # too large or unreadable: the tools refuse it, or it cannot be undone
        return tuple(FileChange(path, data, data) for path, data in sorted(self.touched.items()))

    def _files_at(self, path: str) -> list[Path]:
        """The file at a path inside the tree, links followed, or all files of a directory."""
        place = Path(os.path.realpath(self.tree.root / path))
        if not place.is_relative_to(self.tree.root) or place == self.tree.root:
            return []
        if not place.is_dir():
            return [place]
        files, num_bytes = [], 0
        for folder, _, names in os.walk(place):
            for file in (Path(folder) / name for name in names):
                status = file.lstat()
                if stat.S_ISREG(status.st_mode):
                    files.append(file)
                    num_bytes += status.st_size + 4096
            if num_bytes > MAX_TOUCHED_BYTES:
                return []
        return files

    async def changes(self, named: Collection[str] = ()) -> tuple[FileChange, ...]:
        """See Mirror. Compares the recorded files only."""
        found: list[FileChange] = []
        while self.touched:
            path, before = self.touched.popitem()
            try:
                after = _content(self.tree.root / path)
            except OSError:
                continue
            if after != before:
                found.append(FileChange(path, before, after))
        return tuple(sorted(found, key=lambda change: change.path))

    async def apply(self, files: Iterable[FileChange]) -> dict[str, str]:
        """See Mirror. Does nothing: the changes are in the tree already."""
        return {}

    async def undo(self, files: Iterable[FileChange]) -> dict[str, str]:
        """See Mirror."""
        assert self.sandbox is not None
        kept_back: dict[str, str] = {}
        for file in files:
            try:
                if _content(self.tree.root / file.path) != file.after:
                    kept_back[file.path] = CHANGED_MEANWHILE
                elif file.before is None:
                    await self.sandbox.files.remove(file.path)
                else:
                    await self.sandbox.files.write(file.path, file.before)
            except (AgentError, OSError) as error:
                kept_back[file.path] = str(error)
        return kept_back


def _content(place: Path) -> bytes | None:
    """A file's contents; None where it does not exist. Raises OSError for other kinds and too large files."""
    try:
        status = place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        raise OSError(f"{place} is too large, or not a file")
    return place.read_bytes()


def check_in_place(root: Path) -> None:
    """Raises ConfigError for a directory that an agent should not work in directly."""
    if Path.home().resolve().is_relative_to(root):
        raise ConfigError(
            "holds your home directory, and commands could change all of it",
            field="--in-place",
            received=str(root),
            fix="name the directory of one project: etude agent ~/project --in-place",
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(
            "cannot be written",
            field="--in-place",
            received=str(root),
            fix="get write permission, or leave --in-place out: the agent then works on a copy",
        )
