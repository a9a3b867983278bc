"""What can be seen of a session while it runs: for terminals, editors, servers and monitors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from etude.errors import InfrastructureError
from etude.records import SampleChunk, Status, ToolCall, ToolResult


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Tokens have come; with `chunk.finish` the message is whole."""

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
    """A fresh context has begun; what came before is at `path` in the workspace."""

    path: str


@dataclass(frozen=True, slots=True)
class Retried:
    """The infrastructure failed and the session goes on without loss."""

    error: InfrastructureError
    attempt: int
    """Failures in a row, this one included."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session has ended, or waits for more words."""

    status: Status
    cause: str


SessionEvent = Sampled | CallStarted | CallEnded | ContextOpened | Retried | SessionEnded
Listener = Callable[[SessionEvent], None]
"""Called with everything as it happens, in the event loop: it must not block or raise."""
