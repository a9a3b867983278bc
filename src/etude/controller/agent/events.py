"""What a person sees of the agent at work: one stream of events for the terminal, programs and editors."""

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
class Said:
    """More of the agent's words."""

    text: str
    kind: str = "text"
    """text, reasoning or summary."""


@dataclass(frozen=True, slots=True)
class MessageEnded:
    """The agent's message is whole."""


@dataclass(frozen=True, slots=True)
class CallsMade:
    """The agent asks for these calls; those with an error will not run."""

    turn: int
    calls: tuple[ToolCall, ...]
    tools: Sequence[ToolSchema] = ()
    """What the agent was offered: which arguments are more than text."""

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """One of the calls' arguments as JSON values; what is not of its kind stays text."""
        return call_arguments(call, self.tools)


@dataclass(frozen=True, slots=True)
class CallRuns:
    """A call has begun to run."""

    turn: int
    position: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallDone:
    """A call has its result: it ran, was refused, or made no sense."""

    turn: int
    position: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class FilesChanged:
    """What a turn changed."""

    turn: int
    files: tuple[FileChange, ...]
    written: bool
    """Whether the repository has it now."""
    kept_back: Mapping[str, str]
    """Paths that were not written, and why."""


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that the person should know: a retry, a fresh context, files left out."""

    text: str
    kind: str = "note"
    """note, retry or context."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The agent has come to an end with what it was asked."""

    status: Status
    cause: str


AgentEvent = Said | MessageEnded | CallsMade | CallRuns | CallDone | FilesChanged | Noted | Ended
OnAgentEvent = Callable[[AgentEvent], None]
"""Called in the event loop: must neither block nor raise."""


def event_document(event: AgentEvent) -> dict[str, Any]:
    """An event as plain JSON values."""
    match event:
        case Said() | Noted():
            return {"event": event.kind, "text": event.text}
        case MessageEnded():
            return {"event": "message_end"}
        case CallsMade():
            calls = [call_document(call) | {"arguments": event.arguments(call)} for call in event.calls]
            return {"event": "calls", "turn": event.turn, "calls": calls}
        case CallRuns():
            return {"event": "call_started", **_place(event)}
        case CallDone():
            return {"event": "call_ended", **_place(event), "result": result_document(event.result)}
        case FilesChanged():
            files = [{"path": file.path, "diff": file.diff()} for file in event.files]
            change = {"turn": event.turn, "written": event.written, "files": files}
            return {"event": "changed", **change, "kept_back": dict(event.kept_back)}
        case Ended():
            return {"event": "ended", "status": event.status.value, "cause": event.cause}


def _place(event: CallRuns | CallDone) -> dict[str, Any]:
    return {"turn": event.turn, "position": event.position, "name": event.call.name}
