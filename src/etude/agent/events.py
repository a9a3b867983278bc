"""Events of a running session, for terminals, editors, servers and monitors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from etude.errors import InfrastructureError
from etude.records import SampleChunk, Status, ToolCall, ToolResult


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Tokens were sampled; a chunk with `finish` completes the message."""

    chunk: SampleChunk
    summarising: bool = False
    """Whether they belong to a summary of the agent's own context."""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of the present turn has begun to run."""

    position: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call of the present turn has its result."""

    position: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class ContextOpened:
    """A new context has begun after a summary; the previous one is archived at `path` in the workspace."""

    path: str


@dataclass(frozen=True, slots=True)
class Retried:
    """The infrastructure failed; the session continues without loss."""

    error: InfrastructureError
    attempt: int
    """Failures in a row, this one included."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session has ended, or waits for a user message."""

    status: Status
    cause: str


SessionEvent = Sampled | CallStarted | CallEnded | ContextOpened | Retried | SessionEnded
Listener = Callable[[SessionEvent], None]
"""Called with each event as it happens, in the event loop: must not block or raise."""
