"""Readers of answers: tokens in as they are sampled, out what the client is served.

Chat answers are read by the grammar, their calls served while they are written:

    CallStarted .. ArgumentDelta .. ArgumentDelta .. CallFinished
                   CallHead {"a": "  CallMore x"      CallMore }

A call's head waits for its first argument (or its end), so that a stray tag is still served as the text that
it is. A call that turns out malformed after its head was served ends without its closing brace: its arguments
are never valid JSON, so that no client runs half of them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.records import ToolCall
from etude.tokens.chat.messages import Call
from etude.tokens.chat.reader import AnswerReader, Part, ReadingRules, TextPart, begun_stop
from etude.tokens.grammar.events import ArgumentDelta, CallStarted
from etude.tokens.renderer import Renderer
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


ServedPart = Part | CallHead | CallMore


class Reader(Protocol):
    """Reads one answer."""

    ended: bool
    """A stop string has come: no more tokens are wanted."""

    def feed(self, tokens: NDArray[np.int32]) -> tuple[Sequence[ServedPart], int]:
        """What these tokens add, and how many of them belong to the answer."""
        ...

    def finish(self) -> Sequence[ServedPart]:
        """What was held back."""
        ...


class ChatReader(AnswerReader):
    """Reads an answer of a chat. Takes time linear in it, times the number of stop strings."""

    def __init__(self, renderer: Renderer, rules: ReadingRules, new_id: Callable[[], str]) -> None:
        super().__init__(renderer, rules, new_id)
        self._tools = {tool.name: tool for tool in getattr(renderer.grammar, "tools", ())}
        self._name = ""
        self._open: _OpenCall | None = None
        self.num_calls = 0
        """Whose head was served."""

    def _take_begun(self, event: CallStarted | ArgumentDelta) -> None:
        if isinstance(event, CallStarted):
            self._name, self._open = event.name, None
        elif self._rules.calls and self._name in self._tools:
            call = self._open or self._begin()
            kinds = {one.name: one.kind for one in self._tools[self._name].parameters}
            self._say(call.more(event, as_text=kinds.get(event.name, "string") == "string"))

    def _begin(self) -> _OpenCall:
        self._serve_held()
        self._open = _OpenCall(self._new_id())
        self.num_calls += 1
        self._out.append(CallHead(self._open.id, self._name))
        return self._open

    def _take_call(self, call: ToolCall) -> None:
        opened, self._open = self._open, None
        well_formed = call.error is None and self._rules.calls
        if opened is None and well_formed:
            self._name = call.name
            opened, self._open = self._begin(), None
        if opened is None:
            super()._take_call(call)
            return
        self._raw, self._delivered = [], []
        self.num_malformed += not well_formed
        values = self._values(call) if well_formed else {}
        self._say(opened.close(values) if well_formed else "")
        arguments: Any = values if well_formed else opened.text
        self._end_call(Call(opened.id, call.name, arguments))

    def _say(self, text: str) -> None:
        if text:
            self._out.append(CallMore(text))


class _OpenCall:
    """One call whose head was served: the JSON of its arguments, as it grows.

    Text is served as it comes; a value of another kind, which only its end decides, when the call ends or the
    next argument begins.
    """

    def __init__(self, call_id: str) -> None:
        self.id = call_id
        self.text = ""
        self._argument: str | None = None
        self._told: set[str] = set()

    def more(self, event: ArgumentDelta, as_text: bool) -> str:
        """What a delta adds to the JSON."""
        if not as_text:
            return ""
        added = ""
        if event.name != self._argument:
            added = self._end_argument() + self._key(event.name) + '"'
            self._argument = event.name
        return self._keep(added + json.dumps(event.text, ensure_ascii=False)[1:-1])

    def close(self, values: dict[str, Any]) -> str:
        """What is left to be told of a well-formed call."""
        added = self._end_argument()
        for name, value in values.items():
            if name not in self._told:
                added += self._key(name) + json.dumps(value, ensure_ascii=False)
        return self._keep(added + ("}" if self._told else "{}"))

    def _end_argument(self) -> str:
        ending, self._argument = "" if self._argument is None else '"', None
        return ending

    def _key(self, name: str) -> str:
        lead = ", " if self._told else "{"
        self._told.add(name)
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "

    def _keep(self, added: str) -> str:
        self.text += added
        return added


class TextReader:
    """Reads a completion: every token is text, control tokens are not shown. Implements `Reader`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.ended = False

    def feed(self, tokens: NDArray[np.int32]) -> tuple[Sequence[ServedPart], int]:
        """See Reader.feed."""
        if not self._stops:
            text = self._decoder.decode(self._tokenizer.decode_bytes(tokens, skip_control=True))
            return _text(text), len(tokens)
        shown: list[str] = []
        for count, token in enumerate(tokens.tolist(), start=1):
            data = self._tokenizer.decode_bytes([token], skip_control=True)
            shown.append(self._search(self._decoder.decode(data)))
            if self.ended:
                return _text("".join(shown)), count
        return _text("".join(shown)), len(tokens)

    def finish(self) -> Sequence[ServedPart]:
        """See Reader.finish. Half a character that nothing completes becomes U+FFFD."""
        if self.ended:
            return []
        shown = self._search(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return _text(shown + ("" if self.ended else held))

    def _search(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held, self.ended = "", True
            return text[: min(found)]
        kept = begun_stop(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _text(text: str) -> list[ServedPart]:
    return [TextPart(text)] if text else []
