"""Reads an answer while it is sampled: tokens in, what the client is served out.

Each token is read by itself, so that an answer can end at the very token that completed a stop string (or,
where the client wants one call at a time, a call). Blanks at the answer's ends, and between text and calls,
are not served. A malformed call is served as the text that it is, and so is the call of a tool that the
client did not offer, its tags included. One that can be read is served as a call, be its arguments right or
wrong: the client says so to the model.

Calls are served while they are written, or with `whole_calls` when they have ended:

    CallStarted .. ArgumentDelta .. ArgumentDelta .. CallFinished
                   CallHead {"a": "  CallMore x"      CallMore }

A call's head waits for its first argument (or its end), so that a stray tag is still served as the text that
it is. A call that turns out malformed after its head was served, or to have a number where text was served,
ends without its closing brace: its arguments are never valid JSON, so that no client runs half of them.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.records import SampleChunk
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.chat.messages import Answer, Call
from etude.tokens.grammar.channels import THINK_CLOSE, THINK_MARKS
from etude.tokens.grammar.events import (
    ArgumentDelta,
    CallFinished,
    CallStarted,
    ParseEvent,
    ReasoningDelta,
    TextDelta,
)
from etude.tokens.grammar.message_parser import WordSet
from etude.tokens.renderer import Renderer
from etude.tokens.stream import MessageStream
from etude.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallHead:
    """A call begins."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallMore:
    """More of the JSON text of the last call's arguments."""

    text: str


Part = TextDelta | ReasoningDelta | CallHead | CallMore
_TAG = re.compile(r"</?[a-z][a-z0-9_]*>")


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """What a request asks of the reading of its answer."""

    stops: tuple[str, ...] = ()
    """The answer ends before the first of these in its text; the text is not served."""
    single_call: bool = False
    """The answer ends with its first call."""
    calls: bool = True
    """False: calls are text."""
    whole_calls: bool = False
    """Calls are served when they have ended. For clients that make the best of half a call."""


class TextReader:
    """Reads one answer, up to a stop string in its text. Takes time linear in it, times their number.

    That of a completion: every token is text, control tokens are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = WordSet(sorted(stops))
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._out: list[Part] = []
        """Parts to be served next."""
        self.stop: str | None = None
        """The stop string that ended the answer."""
        self.ended = False
        """A stop string or the only call has come: no more tokens are wanted."""

    @property
    def answer(self) -> Answer:
        """What was served so far of a conversation's answer."""
        return Answer()

    def feed(self, tokens: NDArray[np.int32]) -> tuple[list[Part], int]:
        """What these tokens add to what is served, and how many of them belong to the answer."""
        for count, token in enumerate(tokens.tolist(), start=1):
            self._take_token(token)
            if self.ended:
                return self._served(), count
        return self._served(), len(tokens)

    def finish(self) -> list[Part]:
        """What was held back."""
        if not self.ended:
            self._take_end()
        if not self.ended:
            self._release()
        return self._served()

    def _take_token(self, token: int) -> None:
        data = self._tokenizer.decode_bytes([token], skip_control=True)
        self._search_stops(self._decoder.decode(data))

    def _take_end(self) -> None:
        """No more tokens come: half a character that nothing completes becomes U+FFFD."""
        self._search_stops(self._decoder.decode(b"", final=True))

    def _serve_text(self, text: str) -> None:
        """Serves text that holds no stop string, nor the beginning of one."""
        if text:
            self._out.append(TextDelta(text))

    def _served(self) -> list[Part]:
        out, self._out = self._out, []
        return out

    def _release(self) -> None:
        """What was held back as the beginning of a stop string was none."""
        held, self._held = self._held, ""
        self._serve_text(held)

    def _search_stops(self, text: str) -> None:
        """Serves text up to a stop string; holds back what may become one."""
        text = self._held + text
        if found := self._stops.find(text):
            start, end = found
            self.stop, self._held, self.ended = text[start:end], "", True
        else:
            start = self._stops.undecided(text)
            self._held = text[start:]
        self._serve_text(text[:start])


class AnswerReader(TextReader):
    """Reads one answer of a conversation."""

    def __init__(self, renderer: Renderer, rules: ReadingRules) -> None:
        super().__init__(renderer.tokenizer, rules.stops)
        self._renderer = renderer
        self._rules = rules
        self._stream = MessageStream(renderer)
        self._tools = {tool.name: tool for tool in renderer.grammar.tools} if rules.calls else {}
        self._foreign = _foreign_tags(renderer)
        self._name: str | None = None
        """Of the call that is being written."""
        self._open: _OpenCall | None = None
        """It, if its head was served."""
        self._raw: list[int] = []
        """Tokens since the last call."""
        self._delivered: list[str] = []
        """What the parser made of them."""
        self._blanks = ""
        self._begun = False
        """Text was served since the answer began."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self.num_malformed = 0

    @property
    def answer(self) -> Answer:
        return Answer("".join(self._text), tuple(self._calls), "".join(self._reasoning).strip())

    def _take_token(self, token: int) -> None:
        self._raw.append(token)
        events = self._stream.feed([token])
        self._take(events)
        foreign = self._foreign.get(token)
        if foreign and self._name is None and ReasoningDelta(foreign) not in events:
            self._take([TextDelta(foreign)])

    def _take_end(self) -> None:
        self._take(self._stream.finish())

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
                self._out.append(ReasoningDelta(event.text))
            elif isinstance(event, CallStarted):
                self._name, self._open = event.name, None
            elif isinstance(event, ArgumentDelta):
                self._take_argument(event)
            else:
                self._take_call(event)

    def _take_argument(self, delta: ArgumentDelta) -> None:
        tool = self._tools.get(self._name or "")
        if tool is not None and not self._rules.whole_calls:
            call = self._open or self._begin(tool.name)
            kinds = {one.name: one.kind for one in tool.parameters}
            if kinds.get(delta.name, "string") == "string":
                self._serve_more(call.more(delta))

    def _take_call(self, event: CallFinished) -> None:
        call, opened, self._open, self._name = event.call, self._open, None, None
        values = self._read_values(event)
        self.num_malformed += call.error is not None
        raw = self._raw_call() if opened is None and values is None else ""
        self._raw, self._delivered = [], []
        if raw:
            self._search_stops(raw)
        if opened is None and values is not None:
            opened, self._open = self._begin(call.name), None
        if opened is None:
            return
        rest = opened.close(values) if values is not None and opened.is_begun_as(values) else None
        self._serve_more(rest or "")
        arguments: Any = opened.text if rest is None else values
        self._calls.append(Call(opened.id, call.name, arguments))
        self.ended = self._rules.single_call

    def _read_values(self, event: CallFinished) -> dict[str, Any] | None:
        """The arguments of a call that the client is to answer, be they right or wrong; None for one that it
        cannot: of a tool that it did not offer, or one that cannot be read."""
        call = event.call
        if call.name not in self._tools or not (call.error is None or event.unfit):
            return None
        known = event.values
        return call_arguments(call, self._renderer.grammar.tools) if known is None else dict(known)

    def _begin(self, name: str) -> _OpenCall:
        """A call begins."""
        self._release()
        self._blanks = ""
        self._open = _OpenCall(f"call_{secrets.token_hex(12)}")
        self._out.append(CallHead(self._open.id, name))
        return self._open

    def _serve_more(self, text: str) -> None:
        if text:
            self._out.append(CallMore(text))

    def _raw_call(self) -> str:
        """The characters of the call that has just ended: those after what was delivered as text."""
        raw = self._tokenizer.decode(self._raw)
        position = 0
        for text in self._delivered:
            found = raw.find(text, position)
            position = found + len(text) if found >= 0 else position
        return self._renderer.without_end(raw[position:].removeprefix(THINK_CLOSE))

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
            self._out.append(TextDelta(kept))


class _OpenCall:
    """One call whose head was served: the JSON of its arguments, as it grows.

    Text is served as it comes; a value of another kind, which only its end decides, when the call ends or the
    next argument begins.
    """

    def __init__(self, call_id: str) -> None:
        self.id = call_id
        self.text = ""
        self._argument: str | None = None
        self._begun: set[str] = set()

    def more(self, event: ArgumentDelta) -> str:
        """What a delta of a text adds to the JSON."""
        added = ""
        if event.name != self._argument:
            added = self._end_argument() + self._key(event.name) + '"'
            self._argument = event.name
        return self._keep(added + json.dumps(event.text, ensure_ascii=False)[1:-1])

    def is_begun_as(self, values: dict[str, Any]) -> bool:
        """Whether what was served as text is text: it is served before its kind is known."""
        return all(isinstance(values.get(name), str) for name in self._begun)

    def close(self, values: dict[str, Any]) -> str:
        """What is left to be served of a well-formed call."""
        added = self._end_argument()
        for name, value in values.items():
            if name not in self._begun:
                added += self._key(name) + json.dumps(value, ensure_ascii=False)
        return self._keep(added + ("}" if self._begun else "{}"))

    def _end_argument(self) -> str:
        ending, self._argument = "" if self._argument is None else '"', None
        return ending

    def _key(self, name: str) -> str:
        lead = ", " if self._begun else "{"
        self._begun.add(name)
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "

    def _keep(self, added: str) -> str:
        self.text += added
        return added


def _foreign_tags(renderer: Renderer) -> dict[int, str]:
    """Tags that are one token of the tokenizer's, of tools that the conversation does not offer."""
    names = {name: renderer.tokenizer.control_id(name) for name in renderer.tokenizer.control_tokens}
    frame = {*renderer.template.control_tokens, *THINK_MARKS}
    return {
        token: name
        for name, token in names.items()
        if token not in renderer.tags and name not in frame and _TAG.fullmatch(name)
    }


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
