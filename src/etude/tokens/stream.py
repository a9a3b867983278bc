"""Incremental parser of one message of the agent: sampled tokens in, parse events out.

A character, a tag or a call may be split between any two tokens: events are emitted as soon as they are
decided, and add up to those of `Renderer.parse_events` for the whole message.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from etude.records import ToolCall
from etude.tokens.grammar.events import CallFinished, CallStarted, ParseEvent
from etude.tokens.pieces import Piece
from etude.tokens.renderer import Renderer


class MessageStream:
    """Parses one message's tokens, in chunks of any size. Takes time linear in the message; never raises."""

    def __init__(self, renderer: Renderer) -> None:
        self._tokenizer = renderer.tokenizer
        self._tags = renderer.tags
        self._end_tokens = renderer.end_tokens
        self._parser = renderer.parser()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end_held: list[int] = []
        self._last: bytes | Piece = renderer.template.prompt[-1]

    def feed(self, tokens: Sequence[int] | NDArray[np.int32]) -> list[ParseEvent]:
        """The events that these tokens add. A final end token is held back, as the message may continue."""
        listed: list[int] = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        if not listed:
            return []
        listed = self._end_held + listed
        self._end_held = [listed.pop()] if listed[-1] in self._end_tokens else []
        events: list[ParseEvent] = []
        for piece in self._tokenizer.byte_pieces(listed, self._tags, self._last):
            self._last = piece
            if isinstance(piece, bytes):
                if text := self._decoder.decode(piece):
                    events += self._parser.feed_events(text)
            else:
                events += self._end_text()
                events += self._parser.feed_events(piece)
        return events

    def finish(self) -> list[ParseEvent]:
        """Events of held-back text, and of unclosed calls. Nothing may be fed after."""
        return self._end_text() + self._parser.finish_events()

    def _end_text(self) -> list[ParseEvent]:
        """Ends a run of text: an incomplete character becomes U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return self._parser.feed_events(rest) if rest else []


Spans = tuple[tuple[int, int], ...]
"""Ranges of tokens [start, end) in a message."""


def malformed_spans(message: NDArray[np.int32], calls: Sequence[ToolCall], renderer: Renderer) -> Spans:
    """The tokens of a whole message that make up its malformed calls.

    `calls`: the message's calls in order, possibly cut at a limit; the last one then covers all that follow.
    If the message holds no call and `calls` an error, it is the token that ended the message.
    """
    if all(call.error is None for call in calls):
        return ()
    spans = _call_spans(message, renderer)
    if not spans:
        return ((len(message) - 1, len(message)),)
    found = [(call, *span) for call, span in zip(calls, spans, strict=False)]
    call, start, _ = found[-1]
    found[-1] = (call, start, spans[-1][1])
    return tuple((start, end) for call, start, end in found if call.error is not None)


def _call_spans(message: NDArray[np.int32], renderer: Renderer) -> list[tuple[int, int]]:
    """The tokens of each call, from its opening tag to its end, in the order of `Renderer.parse`."""
    stream = MessageStream(renderer)
    steps = [(place, stream.feed([token])) for place, token in enumerate(message.tolist(), start=1)]
    spans: list[tuple[int, int]] = []
    waiting = start = 0
    for end, events in [*steps, (len(message), stream.finish())]:
        for event in events:
            if isinstance(event, CallStarted):
                start = waiting
            elif isinstance(event, CallFinished):
                spans.append((start, end))
        if events:
            waiting = end
    return spans
