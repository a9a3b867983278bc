"""Messages in channels, as gpt-oss writes them: each part says in a header what it is.

    <|channel|>analysis<|message|>It fails. <|end|><|start|>assistant<|channel|>final<|message|>I look.
    └─ header ───────────────────┘reasoning└─ header ───────────────────────────────────────┘words

The grammar's own parser reads what stands behind the headers, and reasoning between the marks that it knows.
"""

from __future__ import annotations

from etude.tokens.grammar.events import ParseEvent
from etude.tokens.grammar.interface import CallParser
from etude.tokens.grammar.message_parser import THINK_CLOSE, THINK_OPEN
from etude.tokens.pieces import Control, Piece

CHANNEL = Control("<|channel|>")
MESSAGE = Control("<|message|>")
PART_END = Control("<|end|>")
_START = Control("<|start|>")
_ANALYSIS = "analysis"
REASONING_HEADER: tuple[Piece, ...] = (CHANNEL, _ANALYSIS, MESSAGE)


class ChannelMarks:
    """Turns the headers of one message into marks of reasoning."""

    def __init__(self) -> None:
        self.header: list[str] | None = None
        """Words of a header that has begun and not ended."""
        self._thinking = False

    def translate(self, piece: Piece) -> list[Piece]:
        """What stands for this piece: itself, marks of reasoning, or nothing for the words of a header."""
        if piece == MESSAGE and self.header is not None:
            words, self.header = "".join(self.header).split(), None
            return self._turn(thinking=words[:1] == [_ANALYSIS])
        if piece in (_START, CHANNEL, PART_END):
            self.header = None if piece == PART_END else []
            return self._turn(thinking=False)
        if self.header is not None and isinstance(piece, str):
            self.header.append(piece)
            return []
        return [piece]

    def _turn(self, *, thinking: bool) -> list[Piece]:
        """Begins or ends reasoning, where that is a change."""
        if thinking == self._thinking:
            return []
        self._thinking = thinking
        return [Control(THINK_OPEN if thinking else THINK_CLOSE)]


class ChannelParser:
    """Parses one message. See `CallParser`."""

    def __init__(self, parser: CallParser) -> None:
        """`parser` recognises marks of reasoning at least as control tokens."""
        self._parser = parser
        self._marks = ChannelMarks()

    def feed_events(self, piece: Piece) -> list[ParseEvent]:
        """What this piece adds; the words of a header add nothing."""
        return [event for one in self._marks.translate(piece) for event in self._parser.feed_events(one)]

    def finish_events(self) -> list[ParseEvent]:
        """What was held back, a header that did not end included, and the calls left unclosed."""
        begun = "".join(self._marks.header or ())
        events = self._parser.feed_events(begun) if begun else []
        return events + self._parser.finish_events()
