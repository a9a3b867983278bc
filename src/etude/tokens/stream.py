"""One message of the agent as its tokens are sampled: tokens in, parse events out.

A character, a tag or a call may be cut between any two tokens: the events come as soon as they are decided,
and add up to what `Renderer.parse_events` gives for the whole message.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from etude.tokens.grammar.events import ParseEvent
from etude.tokens.renderer import Renderer


class MessageStream:
    """Takes one message's tokens, in chunks of any size. Takes time linear in the message; never raises."""

    def __init__(self, renderer: Renderer) -> None:
        self._tokenizer = renderer.tokenizer
        self._tags = renderer.tags
        self._end_token = renderer.end_token
        self._parser = renderer.parser()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end_held = False

    def feed(self, tokens: Sequence[int] | NDArray[np.int32]) -> list[ParseEvent]:
        """What these tokens add. A last end token is held back: the message ends with it, or goes on."""
        listed: list[int] = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        if not listed:
            return []
        if self._end_held:
            listed.insert(0, self._end_token)
        self._end_held = listed[-1] == self._end_token
        if self._end_held:
            listed.pop()
        events: list[ParseEvent] = []
        for piece in self._tokenizer.byte_pieces(listed, self._tags):
            if isinstance(piece, bytes):
                if text := self._decoder.decode(piece):
                    events += self._parser.feed_events(text)
            else:
                events += self._end_text()
                events += self._parser.feed_events(piece)
        return events

    def finish(self) -> list[ParseEvent]:
        """What was held back, and calls left unclosed. Ends the stream's life."""
        return self._end_text() + self._parser.finish_events()

    def _end_text(self) -> list[ParseEvent]:
        """Half a character that nothing completes becomes U+FFFD."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return self._parser.feed_events(rest) if rest else []
