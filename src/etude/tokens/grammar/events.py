"""What a message says, as it is being written: text, reasoning and calls, in the order of the tokens.

The concatenation of neighbouring deltas of one kind does not depend on how the message was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etude.records import ToolCall


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the agent's words to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what stands between `<think>` and `</think>`, the marks themselves left out."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun. `name` is empty where a malformed call has none."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentDelta:
    """More of one argument of the open call, as text (see `Parameter` for what it holds)."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """The open call has ended. If it is well formed, the deltas of each argument add up to the argument."""

    call: ToolCall
    unfit: bool = False
    """Nothing is wrong but the arguments, of a known tool: one is missing, unknown or of another kind."""
    values: Mapping[str, object] | None = None
    """The arguments of such a call, where they were written as JSON."""


ParseEvent = TextDelta | ReasoningDelta | CallStarted | ArgumentDelta | CallFinished
"""One step of a message. Each `CallFinished` has its `CallStarted` before it; calls never overlap."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One whole message, taken apart."""

    text: str
    """The words outside of calls and reasoning."""
    reasoning: str
    calls: tuple[ToolCall, ...]


def collect(events: Iterable[ParseEvent]) -> ParsedMessage:
    """All events of a message, put together."""
    listed = list(events)
    return ParsedMessage(
        text="".join(event.text for event in listed if isinstance(event, TextDelta)),
        reasoning="".join(event.text for event in listed if isinstance(event, ReasoningDelta)),
        calls=tuple(event.call for event in listed if isinstance(event, CallFinished)),
    )
