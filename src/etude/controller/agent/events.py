"""Events of a running agent, as one stream for the terminal, programs and editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.agent.inputs import call_document, result_document
from etude.controller.agent.changes import FileChange
from etude.records import Status, ToolCall, ToolResult
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.grammar import ToolSchema


@dataclass(frozen=True, slots=True)
class AgentText:
    """A piece of the agent's text."""

    text: str
    kind: str = "text"
    """text, reasoning or summary."""


@dataclass(frozen=True, slots=True)
class MessageEnded:
    """The agent's message is complete."""


@dataclass(frozen=True, slots=True)
class CallsRequested:
    """The agent requests these calls; those with an error will not run."""

    turn: int
    calls: tuple[ToolCall, ...]
    tools: Sequence[ToolSchema] = ()
    """Schemas of the agent's tools, to convert arguments that are not text."""

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """A call's arguments as JSON values; one that does not fit its schema stays text."""
        return call_arguments(call, self.tools)


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call has begun to run."""

    turn: int
    position: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """A call has its result: it ran, was refused, or was invalid."""

    turn: int
    position: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class FilesChanged:
    """The changes of a turn."""

    turn: int
    files: tuple[FileChange, ...]
    written: bool
    """Whether they were written to the repository."""
    kept_back: Mapping[str, str]
    """Paths that were not written, and why."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the person: a retry, a new context, files left out."""

    text: str
    kind: str = "note"
    """note, retry or context."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The agent's run upon an instruction has ended."""

    status: Status
    cause: str


AgentEvent = (
    AgentText
    | MessageEnded
    | CallsRequested
    | ToolCallStarted
    | ToolCallEnded
    | FilesChanged
    | Notice
    | RunEnded
)
OnAgentEvent = Callable[[AgentEvent], None]
"""Callback in the event loop: must neither block nor raise."""


def event_document(event: AgentEvent) -> dict[str, Any]:
    """An event as plain JSON values."""
    match event:
        case AgentText() | Notice():
            return {"event": event.kind, "text": event.text}
        case MessageEnded():
            return {"event": "message_end"}
        case CallsRequested():
            calls = [call_document(call) | {"arguments": event.arguments(call)} for call in event.calls]
            return {"event": "calls", "turn": event.turn, "calls": calls}
        case ToolCallStarted():
            return {"event": "call_started", **_place(event)}
        case ToolCallEnded():
            return {"event": "call_ended", **_place(event), "result": result_document(event.result)}
        case FilesChanged():
            files = [{"path": file.path, "diff": file.diff()} for file in event.files]
            change = {"turn": event.turn, "written": event.written, "files": files}
            return {"event": "changed", **change, "kept_back": dict(event.kept_back)}
        case RunEnded():
            return {"event": "ended", "status": event.status.value, "cause": event.cause}


def _place(event: ToolCallStarted | ToolCallEnded) -> dict[str, Any]:
    return {"turn": event.turn, "position": event.position, "name": event.call.name}
