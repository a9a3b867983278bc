"""Messages in channels, as gpt-oss writes them: each part says in a header what it is.

    <|channel|>analysis<|message|>It fails. <|end|><|start|>assistant<|channel|>final<|message|>I look.
    └─ header ───────────────────┘reasoning└─ header ───────────────────────────────────────┘words

The grammar's own parser reads what stands behind the headers, and reasoning between the marks that it knows.
"""

from __future__ import annotations

from etude.records import ToolCall
from etude.tokens.grammar.events import ParseEvent, finished_calls
from etude.tokens.grammar.interface import CallParser
from etude.tokens.grammar.message_parser import THINK_CLOSE, THINK_OPEN
from etude.tokens.pieces import Control, Piece

CHANNEL = Control("<|channel|>")
MESSAGE = Control("<|message|>")
PART_END = Control("<|end|>")
_START = Control("<|start|>")
_ANALYSIS = "analysis"
REASONING_HEADER: tuple[Piece, ...] = (CHANNEL, _ANALYSIS, MESSAGE)


class ChannelParser:
    """Parses one message. See `CallParser`."""

    def __init__(self, parser: CallParser) -> None:
        """`parser` recognises marks of reasoning at least as control tokens."""
        self._parser = parser
        self._header: list[str] | None = None
        self._thinking = False

    def feed(self, piece: Piece) -> list[ToolCall]:
        """The calls that this piece finishes."""
        return finished_calls(self.feed_events(piece))

    def finish(self) -> list[ToolCall]:
        """The calls that the message leaves open, as malformed calls."""
        return finished_calls(self.finish_events())

    def feed_events(self, piece: Piece) -> list[ParseEvent]:
        """What this piece adds; the words of a header add nothing."""
        if piece == MESSAGE and self._header is not None:
            header, self._header = "".join(self._header), None
            return self._turn(thinking=_ANALYSIS in header)
        if piece in (_START, CHANNEL):
            self._header = [] if self._header is None else self._header
            return self._turn(thinking=False)
        if piece == PART_END:
            return self._turn(thinking=False)
        if self._header is not None and isinstance(piece, str):
            self._header.append(piece)
            return []
        return self._parser.feed_events(piece)

    def finish_events(self) -> list[ParseEvent]:
        """What was held back, a header that did not end included, and the calls left unclosed."""
        begun = "".join(self._header or ())
        events = self._parser.feed_events(begun) if begun else []
        return events + self._parser.finish_events()

    def _turn(self, *, thinking: bool) -> list[ParseEvent]:
        """Begins or ends reasoning, where that is a change."""
        if thinking == self._thinking:
            return []
        self._thinking = thinking
        return self._parser.feed_events(Control(THINK_OPEN if thinking else THINK_CLOSE))
