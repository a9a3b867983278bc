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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"event": self.kind, "text": self.text}


@dataclass(frozen=True, slots=True)
class MessageEnded:
    """The agent's message is whole."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"event": "message_end"}


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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        calls = [call_document(call) | {"arguments": self.arguments(call)} for call in self.calls]
        return {"event": "calls", "turn": self.turn, "calls": calls}


@dataclass(frozen=True, slots=True)
class CallRuns:
    """A call has begun to run."""

    turn: int
    position: int
    call: ToolCall

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"event": "call_started", "turn": self.turn, "position": self.position, "name": self.call.name}


@dataclass(frozen=True, slots=True)
class CallDone:
    """A call has its result: it ran, was refused, or made no sense."""

    turn: int
    position: int
    call: ToolCall
    result: ToolResult

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        place = {"turn": self.turn, "position": self.position, "name": self.call.name}
        return {"event": "call_ended", **place, "result": result_document(self.result)}


@dataclass(frozen=True, slots=True)
class FilesChanged:
    """What a turn changed."""

    turn: int
    files: tuple[FileChange, ...]
    written: bool
    """Whether the repository has it now."""
    kept_back: Mapping[str, str]
    """Paths that were not written, and why."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        files = [{"path": file.path, "diff": file.diff()} for file in self.files]
        kept = dict(self.kept_back)
        return {
            "event": "changed",
            "turn": self.turn,
            "written": self.written,
            "files": files,
            "kept_back": kept,
        }


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that the person should know: a retry, a fresh context, files left out."""

    text: str
    kind: str = "note"
    """note, retry or context."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"event": self.kind, "text": self.text}


@dataclass(frozen=True, slots=True)
class Ended:
    """The agent has come to an end with what it was asked."""

    status: Status
    cause: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"event": "ended", "status": self.status.value, "cause": self.cause}


AgentEvent = Said | MessageEnded | CallsMade | CallRuns | CallDone | FilesChanged | Noted | Ended
OnAgentEvent = Callable[[AgentEvent], None]
"""Told in the event loop: must neither block nor raise."""
