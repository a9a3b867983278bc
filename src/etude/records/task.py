"""A task: what the agent is asked, what it works on, and what it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work with a verifier.

    `files` are what the agent sees; `hidden_files` enter the sandbox only after the agent's last
    action; `solution_files` are the contents of the changed files after the reference fix (never
    shown to an agent, read by the scripted expert and by the generator's own checks).
    """

    id: str
    instruction: str
    """The user's words, without any harness formatting."""
    files: Mapping[str, str]
    """Workspace path (POSIX, relative) -> text."""
    hidden_files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths laid over the workspace for grading; they win over the agent's versions."""
    solution_files: Mapping[str, str] = field(default_factory=dict[str, str])
    allowed_paths: tuple[str, ...] = ("**",)
    """Glob patterns of the workspace paths whose changes reach grading; all others are restored."""
    test_paths: tuple[str, ...] = ()
    """Visible test files, in the order in which `run_tests` runs them."""
    hidden_test_paths: tuple[str, ...] = ()
    """Test files that decide the verdict."""
    metadata: Mapping[str, str | int | float | bool] = field(
        default_factory=dict[str, "str | int | float | bool"]
    )
    """Facts about the task that nothing in the loop depends on: level, family, bug kind, split."""
    user_facts: tuple[str, ...] = ()
    """Sentences that the instruction withholds and a simulated user tells an agent who asks."""
    directory: str | None = None
    """The Harbor task directory that this was read from, if any."""
