"""Reads an answer while it is sampled: tokens in, what the client is served out.

Each token is read by itself, so that an answer can end at the very token that completed a stop string (or,
where the client wants one call at a time, a call). Blanks at the answer's ends, and between text and calls,
are not served. A malformed call is served as the text that it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.environment.recording.client_tools import call_arguments
from etude.environment.recording.messages import Answer, Call
from etude.records import SampleChunk, ToolCall
from etude.tokens.grammar.events import CallFinished, ParseEvent, ReasoningDelta, TextDelta
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
        self._out: list[Part] = []
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

    def _take_call(self, call: ToolCall) -> None:
        raw = self._raw_call()
        self._raw, self._delivered = [], []
        if call.error is not None or not self._rules.calls:
            self.num_malformed += call.error is not None
            self._search_stops(raw)
            return
        held, self._held = self._held, ""
        self._serve_text(held)
        self._blanks = ""
        arguments = call_arguments(call, getattr(self._renderer.grammar, "tools", ()))
        served = Call(self._new_id(), call.name, arguments)
        self._calls.append(served)
        self._out.append(CallPart(served))
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
        kept = _begun(text, self._rules.stops)
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


def _begun(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
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
    return SampleChunk(
        chunk.tokens[:length],
        chunk.logprobs[:length],
        chunk.version,
        chunk.kv_oldest,
        routes,
        chunk.routes_start,
        "stop",
    )
