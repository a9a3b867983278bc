"""The marks of reasoning, and messages in channels, as gpt-oss writes them: each part has a header that names
its channel.

    <|channel|>analysis<|message|>It fails. <|end|><|start|>assistant<|channel|>final<|message|>I look.
    └─ header ───────────────────┘reasoning└─ header ───────────────────────────────────────┘words

The headers are translated to `<think>` marks, which the grammar's own parser reads.
"""

from __future__ import annotations

from etude.tokens.pieces import Control, Piece

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
THINK_MARKS = (THINK_OPEN, THINK_CLOSE)

CHANNEL = Control("<|channel|>")
MESSAGE = Control("<|message|>")
PART_END = Control("<|end|>")
_START = Control("<|start|>")
_ANALYSIS = "analysis"
REASONING_HEADER: tuple[Piece, ...] = (CHANNEL, _ANALYSIS, MESSAGE)


class ChannelMarks:
    """Translates the channel headers of one message to marks of reasoning."""

    def __init__(self) -> None:
        self.header: list[str] | None = None
        """Text of the header that is open, if any."""
        self._thinking = False

    def translate(self, piece: Piece) -> list[Piece]:
        """The translation of a piece: itself, marks of reasoning, or nothing for the text of a header."""
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
        """The mark that begins or ends reasoning; none if the state does not change."""
        if thinking == self._thinking:
            return []
        self._thinking = thinking
        return [Control(THINK_OPEN if thinking else THINK_CLOSE)]
