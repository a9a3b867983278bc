"""State of one session's tools between calls: plain values, saved with the session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

HARNESS_DIRECTORY = ".etude"
"""Below the workspace: long outputs and archives of earlier contexts. Never part of a diff or a grade."""


def is_harness_path(path: str) -> bool:
    """Whether a normal path belongs to the harness, not to the agent's work."""
    return path == HARNESS_DIRECTORY or path.startswith(HARNESS_DIRECTORY + "/")


@dataclass(frozen=True, slots=True)
class Todo:
    """One entry of the agent's to-do list."""

    id: str
    text: str
    status: str = "pending"
    """pending, in_progress, done or cancelled."""


@dataclass(slots=True)
class BackgroundState:
    """State of one background command."""

    pid: int
    """Process id inside the sandbox."""
    shown_bytes: int = 0
    """Bytes of its output shown so far."""
    exit_code: int | None = None
    """None until its end was observed."""


@dataclass(slots=True)
class ToolState:
    """State of one session's tools."""

    todos: list[Todo] = field(default_factory=list[Todo])
    commands: dict[str, BackgroundState] = field(default_factory=dict[str, BackgroundState])
    """Background commands by the id that the agent knows, oldest first."""
    num_outputs: int = 0
    """Long outputs written to files so far; the next one's number."""
    num_questions: int = 0
    """Questions put to the user."""
    findings: dict[str, list[str]] | None = None
    """Lint findings by path at the session's start; None until first computed."""
    changed: list[str] = field(default_factory=list[str])
    """Paths that tools wrote or removed, in the order of their first change."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ToolState:
        """Inverse of `to_dict`."""
        todos = [Todo(**todo) for todo in state["todos"]]
        commands = {name: BackgroundState(**command) for name, command in state["commands"].items()}
        return cls(**{**state, "todos": todos, "commands": commands})
