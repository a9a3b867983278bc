"""Tool calls, their results, and the turns of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ToolErrorClass(StrEnum):
    """Why a tool call failed. The agent can correct the first three."""

    MALFORMED = "malformed"
    """The text does not parse as a call."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """Unknown tool, missing or impossible argument."""
    TIMEOUT = "timeout"
    """The agent's command ran into its time limit."""
    UNEXPECTED_ENVIRONMENT = "unexpected_environment"
    """The files are not as the call assumes (no such file, no unique match)."""
    PROVIDER = "provider"
    """Something behind the tool failed. Infrastructure: never a reward."""
    USER_ABORTED = "user_aborted"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the agent wrote it. `error` is set where the text does not parse."""

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    error: str | None = None
    """What is malformed about the call, in words for the agent; None for a well-formed call."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call, as shown to the agent."""

    output: str
    error: ToolErrorClass | None = None
    finished: bool = False
    """True for the result of the call that ends the session."""
    duration_s: float = 0.0
    """Wall time; for people, never rendered into tokens."""
    facts: Mapping[str, str | int | float | bool] = field(
        default_factory=dict[str, "str | int | float | bool"]
    )
    """Facts for monitors and rewards (path edited, tests passed), never rendered into tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the agent with the results of its calls."""

    segment_id: str
    start: int
    """First token of the agent's message within its segment."""
    end: int
    """One past the last token of the agent's message."""
    text: str
    """The message as text, calls included; for people. Training reads tokens only."""
    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]
    malformed: tuple[tuple[int, int], ...] = ()
    """Tokens [start, end) of the segment that make up the malformed calls of the message; of a message
    without any call, the token that ended it."""
