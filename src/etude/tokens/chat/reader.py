"""Reads an answer while it is sampled: tokens in, what the client is served out.

Each token is read by itself, so that an answer can end at the very token that completed a stop string (or,
where the client wants one call at a time, a call). Blanks at the answer's ends, and between text and calls,
are not served. A malformed call is served as the text that it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.records import SampleChunk, ToolCall
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.chat.messages import Answer, Call
from etude.tokens.grammar.events import (
    ArgumentDelta,
    CallFinished,
    CallStarted,
    ParseEvent,
    ReasoningDelta,
    TextDelta,
)
from etude.tokens.grammar.message_parser import THINK_CLOSE
from etude.tokens.renderer import Renderer
from etude.tokens.stream import MessageStream


@dataclass(frozen=True, slots=True)
class TextPart:
    """More text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """One whole call."""

    call: Call

    @property
    def arguments_json(self) -> str:
        """The arguments as the client is served them."""
        return json.dumps(self.call.arguments, ensure_ascii=False)


Part = TextPart | ReasoningPart | CallPart


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """What a request asks of the reading of its answer."""

    stops: tuple[str, ...] = ()
    """The answer ends before the first of these in its text; the text is not served."""
    single_call: bool = False
    """The answer ends with its first call."""
    calls: bool = True
    """False: calls are text."""


class AnswerReader:
    """Reads one answer. Takes time linear in it, times the number of stop strings."""

    def __init__(self, renderer: Renderer, rules: ReadingRules, new_id: Callable[[], str]) -> None:
        self._renderer = renderer
        self._rules = rules
        self._new_id = new_id
        self._stream = MessageStream(renderer)
        self._raw: list[int] = []
        """Tokens since the last call."""
        self._delivered: list[str] = []
        """What the parser made of them."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._blanks = ""
        self._begun = False
        """Text was served since the answer began."""
        self._out: list[Any] = []
        """Parts to be served next; a reader of another kind may have more kinds of them."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self.num_malformed = 0
        self.stop: str | None = None
        """The stop string that ended the answer."""
        self.ended = False
        """A stop string or the only call has come: no more tokens are wanted."""

    @property
    def answer(self) -> Answer:
        """What was served so far."""
        return Answer("".join(self._text), tuple(self._calls), "".join(self._reasoning).strip())

    def feed(self, tokens: NDArray[np.int32]) -> tuple[list[Part], int]:
        """What these tokens add to what is served, and how many of them belong to the answer."""
        for count, token in enumerate(tokens.tolist(), start=1):
            self._raw.append(token)
            self._take(self._stream.feed([token]))
            if self.ended:
                return self._served(), count
        return self._served(), len(tokens)

    def finish(self) -> list[Part]:
        """What was held back."""
        if not self.ended:
            self._take(self._stream.finish())
        if not self.ended:
            held, self._held = self._held, ""
            self._serve_text(held)
        return self._served()

    def _served(self) -> list[Part]:
        out, self._out = self._out, []
        return out

    def _take(self, events: Iterable[ParseEvent]) -> None:
        for event in events:
            if self.ended:
                return
            if isinstance(event, TextDelta):
                self._delivered.append(event.text)
                self._search_stops(event.text)
            elif isinstance(event, ReasoningDelta):
                self._delivered.append(event.text)
                self._reasoning.append(event.text)
                self._out.append(ReasoningPart(event.text))
            elif isinstance(event, CallFinished):
                self._take_call(event.call)
            else:
                self._take_begun(event)

    def _take_begun(self, event: CallStarted | ArgumentDelta) -> None:
        """Part of a call that has not ended: served with its end here."""

    def _take_call(self, call: ToolCall) -> None:
        raw = self._raw_call()
        self._raw, self._delivered = [], []
        if call.error is not None or not self._rules.calls:
            self.num_malformed += call.error is not None
            self._search_stops(raw)
            return
        self._serve_held()
        served = Call(self._new_id(), call.name, self._values(call))
        self._out.append(CallPart(served))
        self._end_call(served)

    def _values(self, call: ToolCall) -> dict[str, Any]:
        return call_arguments(call, getattr(self._renderer.grammar, "tools", ()))

    def _serve_held(self) -> None:
        """A call begins: what was held back as the beginning of a stop string was none."""
        held, self._held = self._held, ""
        self._serve_text(held)
        self._blanks = ""

    def _end_call(self, served: Call) -> None:
        self._calls.append(served)
        self.ended = self._rules.single_call

    def _raw_call(self) -> str:
        """The characters of the call that has just ended: those after what was delivered as text."""
        raw = self._renderer.tokenizer.decode(self._raw)
        position = 0
        for text in self._delivered:
            found = raw.find(text, position)
            position = found + len(text) if found >= 0 else position
        return raw[position:].removeprefix(THINK_CLOSE).removesuffix(self._renderer.template.end.name)

    def _search_stops(self, text: str) -> None:
        """Serves text up to a stop string; holds back what may become one."""
        text = self._held + text
        found = [(place, stop) for stop in self._rules.stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.stop = min(found)
            self._held, self.ended = "", True
            self._serve_text(text[:place])
            return
        kept = begun_stop(text, self._rules.stops)
        self._held = text[len(text) - kept :]
        self._serve_text(text[: len(text) - kept])

    def _serve_text(self, text: str) -> None:
        """Serves text, blanks at its end only once more text follows."""
        text = self._blanks + text
        if not self._begun:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            self._begun = True
            self._text.append(kept)
            self._out.append(TextPart(kept))


def begun_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string: not to be shown yet."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(stop.startswith(tail) for stop in stops):
            return size
    return 0


def cut_chunk(chunk: SampleChunk, length: int, num_before: int) -> SampleChunk:
    """A chunk's first `length` tokens; `num_before`: tokens of the session before the chunk.

    Its routes end with the token before the last: of the last nothing was computed yet.
    """
    routes = chunk.routes
    if routes is not None:
        routes = routes[: max(num_before + length - 1 - chunk.routes_start, 0)]
    more = (chunk.raw_logprobs, chunk.top_tokens, chunk.top_logprobs)
    raw_logprobs, top_tokens, top_logprobs = (None if rows is None else rows[:length] for rows in more)
    return replace(
        chunk,
        tokens=chunk.tokens[:length],
        logprobs=chunk.logprobs[:length],
        routes=routes,
        finish="stop",
        prefix_digest="",
        raw_logprobs=raw_logprobs,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
    )
