"""Verdicts and outcomes, and which of an agent's changes are graded and how they are applied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from etude.agent.globs import compile_path_pattern
from etude.agent.tools.state import is_harness_path
from etude.records import RewardBreakdown, Status, Task
from etude.sandbox.errors import PathKindError, PathMissingError
from etude.sandbox.inside.testrunner import shorten
from etude.sandbox.interface import Sandbox

CAUSE_CHARS = 400


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the hidden tests pass. `cause`: the first reason why not, at most 400 characters."""

    passed: bool
    num_passed: int
    num_failed: int
    cause: str | None
    duration_s: float
    lints: int = 0
    """Linter findings that the agent's changes added; 0 if not counted."""
    style: int = 0
    """Added lines in another style than their file's; 0 if not counted."""
    reward: float | None = None
    """Reward of the task's own `tests/test.sh`; None if hidden tests were judged by their values."""
    rewards: Mapping[str, float] | None = None
    """All of its rewards, by name; None if it gave none."""

    def __post_init__(self) -> None:
        if self.cause is not None:
            object.__setattr__(self, "cause", shorten(self.cause, CAUSE_CHARS))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a session: how it ended, its verdict and its reward."""

    status: Status
    verdict: Verdict
    reward: RewardBreakdown


def allowed_changes(task: Task, changes: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """The agent's changes that are graded: in allowed paths, without bytecode, the harness' own files, and
    paths that hidden files need."""
    claimed = set(task.hidden_files)
    folders = {folder for path in claimed for folder in folders_above(path)}
    return {
        path: data
        for path, data in changes.items()
        if not is_bytecode(path)
        and not is_harness_path(path)
        and matches_any(path, task.allowed_paths)
        and not _collides(path, claimed, folders)
    }


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a glob: `*` and `?` within one level, `**` over any number of levels."""
    return any(_compiled_pattern(pattern)(path) for pattern in patterns)


_compiled_pattern = lru_cache(maxsize=1024)(compile_path_pattern)


def is_bytecode(path: str) -> bool:
    """Whether a file is Python bytecode."""
    return path.endswith((".pyc", ".pyo")) or "__pycache__" in path.split("/")


def _collides(path: str, claimed: set[str], folders: set[str]) -> bool:
    """Whether `path` is a hidden file, is where a hidden file's folder must be, or is below a hidden file."""
    return path in claimed or path in folders or any(folder in claimed for folder in folders_above(path))


def folders_above(path: str) -> Iterator[str]:
    """The folders above a path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


async def apply_changes(files: Mapping[str, str | bytes | None], fresh: Sandbox) -> None:
    """Applies changes of files to a sandbox in the agent's initial state; None removes a file."""
    for path in (path for path, data in files.items() if data is None):
        with contextlib.suppress(PathMissingError, PathKindError):
            await fresh.files.remove(path)
    entering = {path: data for path, data in files.items() if data is not None}
    try:
        await fresh.files.write_many(entering)
    except PathKindError:
        for path, data in entering.items():  # one of them replaces a directory or a link
            try:
                await fresh.files.write(path, data)
            except PathKindError:
                await fresh.files.remove(path)
                await fresh.files.write(path, data)
