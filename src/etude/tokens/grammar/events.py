"""Parse events of a message while it is written: text, reasoning and calls, in the order of the tokens.

The concatenation of neighbouring deltas of one kind does not depend on how the message was split into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etude.records import ToolCall


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the message's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the text between `<think>` and `</think>`, without the marks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun. `name` is empty if a malformed call has none."""

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
    """Only the arguments of a known tool are wrong: one is missing, unknown or of another kind."""
    values: Mapping[str, object] | None = None
    """The arguments of such a call, if they were written as JSON."""


ParseEvent = TextDelta | ReasoningDelta | CallStarted | ArgumentDelta | CallFinished
"""One step of a message. Each `CallFinished` has its `CallStarted` before it; calls never overlap."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """The parts of one whole message."""

    text: str
    """The text outside of calls and reasoning."""
    reasoning: str
    calls: tuple[ToolCall, ...]


def collect(events: Iterable[ParseEvent]) -> ParsedMessage:
    """Assembles all events of a message."""
    listed = list(events)
    return ParsedMessage(
        text="".join(event.text for event in listed if isinstance(event, TextDelta)),
        reasoning="".join(event.text for event in listed if isinstance(event, ReasoningDelta)),
        calls=tuple(event.call for event in listed if isinstance(event, CallFinished)),
    )
