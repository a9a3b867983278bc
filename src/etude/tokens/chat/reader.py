"""Incremental reader of an answer: sampled tokens in, parts of the response out.

Tokens are read one at a time, so that an answer can end exactly at the token that completed a stop string
(or, if the client wants single calls, a call). Blanks at the answer's ends, and between text and calls, are
dropped. A malformed call is served as text, and so is a call of a tool that the client did not offer, its
tags included. A call that parses is served as a call, even with wrong arguments: the client reports that to
the model.

Calls are served while they are written, or with `whole_calls` when complete:

    CallStarted .. ArgumentDelta .. ArgumentDelta .. CallFinished
                   CallHead {"a": "  CallDelta x"     CallDelta }

A call's head waits for its first argument (or its end), so that a stray tag is still served as text. A call
that turns out malformed after its head was served, or has a number where text was served, ends without its
closing brace: its arguments are never valid JSON, so that no client runs a partial call.
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
class CallDelta:
    """More of the JSON text of the last call's arguments."""

    text: str


Part = TextDelta | ReasoningDelta | CallHead | CallDelta
_TAG = re.compile(r"</?[a-z][a-z0-9_]*>")


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """How a request wants its answer parsed."""

    stops: tuple[str, ...] = ()
    """Stop strings: the answer ends before the first of these in its text."""
    single_call: bool = False
    """The answer ends with its first call."""
    calls: bool = True
    """False: calls are served as text."""
    whole_calls: bool = False
    """Calls are served only when complete, for clients that would run a partial call."""


class TextReader:
    """Reads one plain completion, up to a stop string. Takes time linear in it, times their number.

    Every token is text; control tokens are dropped.
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
        """Whether a stop string or the only call is complete: no more tokens are needed."""

    @property
    def answer(self) -> Answer:
        """The answer as served so far, as a message of a conversation."""
        return Answer()

    def feed(self, tokens: NDArray[np.int32]) -> tuple[list[Part], int]:
        """The parts that these tokens add, and how many of the tokens belong to the answer."""
        for count, token in enumerate(tokens.tolist(), start=1):
            self._read_token(token)
            if self.ended:
                return self._served(), count
        return self._served(), len(tokens)

    def finish(self) -> list[Part]:
        """Ends the answer; returns the parts that were held back."""
        if not self.ended:
            self._read_end()
        if not self.ended:
            self._release()
        return self._served()

    def _read_token(self, token: int) -> None:
        data = self._tokenizer.decode_bytes([token], skip_control=True)
        self._search_stops(self._decoder.decode(data))

    def _read_end(self) -> None:
        """Ends the input: an incomplete character becomes U+FFFD."""
        self._search_stops(self._decoder.decode(b"", final=True))

    def _serve_text(self, text: str) -> None:
        """Serves text that contains no stop string and no beginning of one."""
        if text:
            self._out.append(TextDelta(text))

    def _served(self) -> list[Part]:
        out, self._out = self._out, []
        return out

    def _release(self) -> None:
        """Serves the text that was held back as the possible beginning of a stop string."""
        held, self._held = self._held, ""
        self._serve_text(held)

    def _search_stops(self, text: str) -> None:
        """Serves text up to a stop string; holds back what may become one."""
        text = self._held + text
        if found := self._stops.find(text):
            start, end = found
            self.stop, self._held, self.ended = text[start:end], "", True
        else:
            start = self._stops.partial_start(text)
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
        """Name of the call that is being written."""
        self._open: _OpenCall | None = None
        """That call, if its head was served."""
        self._raw: list[int] = []
        """Tokens since the last call."""
        self._delivered: list[str] = []
        """Text and reasoning that the parser gave for them."""
        self._blanks = ""
        self._begun = False
        """Whether text was served since the answer began."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self.num_malformed = 0

    @property
    def answer(self) -> Answer:
        return Answer("".join(self._text), tuple(self._calls), "".join(self._reasoning).strip())

    def _read_token(self, token: int) -> None:
        self._raw.append(token)
        events = self._stream.feed([token])
        self._handle_events(events)
        foreign = self._foreign.get(token)
        if foreign and self._name is None and ReasoningDelta(foreign) not in events:
            self._handle_events([TextDelta(foreign)])

    def _read_end(self) -> None:
        self._handle_events(self._stream.finish())

    def _handle_events(self, events: Iterable[ParseEvent]) -> None:
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
                self._handle_argument(event)
            else:
                self._finish_call(event)

    def _handle_argument(self, delta: ArgumentDelta) -> None:
        tool = self._tools.get(self._name or "")
        if tool is not None and not self._rules.whole_calls:
            call = self._open or self._begin(tool.name)
            kinds = {parameter.name: parameter.kind for parameter in tool.parameters}
            if kinds.get(delta.name, "string") == "string":
                self._serve_delta(call.add_delta(delta))

    def _finish_call(self, event: CallFinished) -> None:
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
        rest = opened.close(values) if values is not None and opened.agrees_with(values) else None
        self._serve_delta(rest or "")
        arguments: Any = opened.text if rest is None else values
        self._calls.append(Call(opened.id, call.name, arguments))
        self.ended = self._rules.single_call

    def _read_values(self, event: CallFinished) -> dict[str, Any] | None:
        """The arguments, valid or not, of a call to be served; None for one that is served as text: of a tool
        that the client did not offer, or one that cannot be parsed."""
        call = event.call
        if call.name not in self._tools or not (call.error is None or event.unfit):
            return None
        known = event.values
        return call_arguments(call, self._renderer.grammar.tools) if known is None else dict(known)

    def _begin(self, name: str) -> _OpenCall:
        """Begins a call and serves its head."""
        self._release()
        self._blanks = ""
        self._open = _OpenCall(f"call_{secrets.token_hex(12)}")
        self._out.append(CallHead(self._open.id, name))
        return self._open

    def _serve_delta(self, text: str) -> None:
        if text:
            self._out.append(CallDelta(text))

    def _raw_call(self) -> str:
        """The characters of the call that has just ended: those after the text already delivered."""
        raw = self._tokenizer.decode(self._raw)
        position = 0
        for text in self._delivered:
            found = raw.find(text, position)
            position = found + len(text) if found >= 0 else position
        return self._renderer.without_end(raw[position:].removeprefix(THINK_CLOSE))

    def _serve_text(self, text: str) -> None:
        """Serves text; blanks at its end are held back until more text follows."""
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
    """One call whose head was served: the growing JSON of its arguments.

    Text is served as it arrives; a value of another kind, which is known only at its end, when the call ends
    or the next argument begins.
    """

    def __init__(self, call_id: str) -> None:
        self.id = call_id
        self.text = ""
        self._argument: str | None = None
        self._begun: set[str] = set()

    def add_delta(self, event: ArgumentDelta) -> str:
        """The JSON text that a delta of a string argument adds."""
        added = ""
        if event.name != self._argument:
            added = self._end_argument() + self._key(event.name) + '"'
            self._argument = event.name
        return self._append(added + json.dumps(event.text, ensure_ascii=False)[1:-1])

    def agrees_with(self, values: dict[str, Any]) -> bool:
        """Whether all arguments served as text are text: they are served before their kind is known."""
        return all(isinstance(values.get(name), str) for name in self._begun)

    def close(self, values: dict[str, Any]) -> str:
        """The rest of the JSON of a well-formed call."""
        added = self._end_argument()
        for name, value in values.items():
            if name not in self._begun:
                added += self._key(name) + json.dumps(value, ensure_ascii=False)
        return self._append(added + ("}" if self._begun else "{}"))

    def _end_argument(self) -> str:
        ending, self._argument = "" if self._argument is None else '"', None
        return ending

    def _key(self, name: str) -> str:
        lead = ", " if self._begun else "{"
        self._begun.add(name)
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "

    def _append(self, added: str) -> str:
        self.text += added
        return added


def _foreign_tags(renderer: Renderer) -> dict[int, str]:
    """Tags that are single tokens, of tools that the conversation does not offer."""
    names = {name: renderer.tokenizer.control_id(name) for name in renderer.tokenizer.control_tokens}
    frame = {*renderer.template.control_tokens, *THINK_MARKS}
    return {
        token: name
        for name, token in names.items()
        if token not in renderer.tags and name not in frame and _TAG.fullmatch(name)
    }


def cut_chunk(chunk: SampleChunk, length: int, num_before: int) -> SampleChunk:
    """A chunk's first `length` tokens; `num_before`: tokens of the session before the chunk.

    Its routes end with the token before the last: the last one has not been computed yet.
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
