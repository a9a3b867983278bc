"""A verdict, what a session earned by it, and what an agent left behind for it: which changes reach grading,
and how they are laid.
"""

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
    """Whether the hidden tests pass. `cause` tells the first reason why not, in 400 characters at most."""

    passed: bool
    num_passed: int
    num_failed: int
    cause: str | None
    duration_s: float
    lints: int = 0
    """Findings of a linter that the agent's changes added; 0 where nobody looked."""
    style: int = 0
    """Added lines in another style than their file's; 0 where nobody looked."""
    reward: float | None = None
    """What the task's own `tests/test.sh` gave; None where hidden tests were judged by their values."""
    rewards: Mapping[str, float] | None = None
    """All that it gave, by name; None where it gave nothing."""

    def __post_init__(self) -> None:
        if self.cause is not None:
            object.__setattr__(self, "cause", shorten(self.cause, CAUSE_CHARS))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session earned."""

    status: Status
    verdict: Verdict
    reward: RewardBreakdown


def allowed_changes(task: Task, changes: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """The agent's changes that reach grading: allowed paths, no bytecode, nothing that hidden files claim,
    nothing of the harness's own."""
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
    """Whether a file is Python's own, made from sources."""
    return path.endswith((".pyc", ".pyo")) or "__pycache__" in path.split("/")


def _collides(path: str, claimed: set[str], folders: set[str]) -> bool:
    """Whether `path` is a hidden file, stands where a hidden file's folder must be, or lies below one."""
    return path in claimed or path in folders or any(folder in claimed for folder in folders_above(path))


def folders_above(path: str) -> Iterator[str]:
    """The folders above a path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


async def lay_files(files: Mapping[str, str | bytes | None], fresh: Sandbox) -> None:
    """Makes changes of files in a sandbox that is as the agent's was at first; None: the file is removed."""
    for path in (path for path, data in files.items() if data is None):
        with contextlib.suppress(PathMissingError, PathKindError):
            await fresh.files.remove(path)
    entering = {path: data for path, data in files.items() if data is not None}
    try:
        await fresh.files.write_many(entering)
    except PathKindError:
        for path, data in entering.items():  # one of them stands where a directory or a link was
            try:
                await fresh.files.write(path, data)
            except PathKindError:
                await fresh.files.remove(path)
                await fresh.files.write(path, data)
