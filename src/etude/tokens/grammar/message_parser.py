"""Base classes of grammars. A streaming parser finds tags and reasoning; a grammar's reader parses calls.

    pieces --> [ channels' headers ] --> [ tags or text? ] --> reasoning                --> ReasoningDelta
                                                           --> the grammar's CallReader --> all other events

A call written inside reasoning is no call. Every character is searched once in each state that sees it, and a
state never looks back, so parsing takes linear time.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from etude.records import ToolCall
from etude.tokens.grammar.channels import THINK_CLOSE, THINK_MARKS, THINK_OPEN, ChannelMarks
from etude.tokens.grammar.events import (
    ArgumentDelta,
    CallFinished,
    CallStarted,
    ParseEvent,
    ReasoningDelta,
    collect,
)
from etude.tokens.grammar.interface import Parameter, ToolSchema, ToolTable
from etude.tokens.pieces import Control, Piece, join_text

ReasoningMarks = Literal["control", "text", "off"]
"""How `<think>` and `</think>` are recognised: as control tokens, also in characters, or not at all."""

_ANY_CLOSING = r"</[a-z_][a-z0-9_]{0,31}>"
_BEGUN_CLOSING = re.compile(r"</?(?:[a-z_][a-z0-9_]{0,31})?")
_LONGEST_ANY = 35


class WordSet:
    """Strings that are recognised in characters, such as tags."""

    def __init__(self, words: Iterable[str], any_closing: bool = False) -> None:
        """Of words that match at the same place the first wins. `any_closing`: includes the closing tag of
        any name."""
        self._words = [word for word in dict.fromkeys(words) if word]
        patterns = [re.escape(word) for word in self._words] + [_ANY_CLOSING] * any_closing
        self._search = re.compile("|".join(patterns) or r"(?!)").search
        self._any_closing = any_closing
        self._initials = frozenset([word[0] for word in self._words] + ["<"] * any_closing)
        self._longest = max([_LONGEST_ANY * any_closing, *map(len, self._words)])

    def find(self, text: str, position: int = 0) -> tuple[int, int] | None:
        """Bounds of the first word from `position` on."""
        match = self._search(text, position)
        return None if match is None else match.span()

    def partial_start(self, text: str, position: int = 0) -> int:
        """Start of the text's tail that may become a word with more text; the text's length if none."""
        for start in range(max(position, len(text) - self._longest + 1), len(text)):
            if text[start] in self._initials and self._is_begun(text[start:]):
                return start
        return len(text)

    def _is_begun(self, begun: str) -> bool:
        if self._any_closing and _BEGUN_CLOSING.fullmatch(begun):
            return True
        return any(word.startswith(begun) for word in self._words)


@dataclass(slots=True)
class OpenCall:
    """One call being read, with values as raw text."""

    name: str
    known: bool = True
    error: str | None = None
    unfit: bool = False
    """See `CallFinished`, also for `values`."""
    values: Mapping[str, object] | None = None
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    parameter: str | None = None
    body: io.StringIO | None = None
    padded: bool = True
    """Whether one newline at each end of the body is padding."""
    fresh: bool = True
    """Whether nothing of a padded body was read: a newline now is padding."""
    newline: bool = False
    """Whether the body so far ends with a newline, which is padding if the body ends here."""

    def fail(self, message: str) -> None:
        """Records an error; only the first is kept, since others are mostly its consequences."""
        self.error, self.unfit = self.error or message, False

    def reject(self, message: str) -> None:
        """Records that the call parses, but its arguments do not fit the tool."""
        if self.error is None:
            self.error, self.unfit = message, True

    def open_body(self, parameter: str, padded: bool = True) -> None:
        """Begins the value of `parameter`; a second value of one parameter is dropped."""
        self.parameter = parameter
        self.body = io.StringIO()
        self.padded = self.fresh = padded
        self.newline = False

    def add_text(self, text: str, out: list[ParseEvent]) -> None:
        """Appends to the body; removes one newline at each end of a padded one."""
        if self.fresh:
            self.fresh = False
            text = text.removeprefix("\n")
        if not text or self.parameter in self.arguments:
            return
        if self.newline:
            text = "\n" + text
        self.newline = self.padded and text.endswith("\n")
        if self.newline:
            text = text[:-1]
        if text:
            assert self.parameter is not None and self.body is not None
            self.body.write(text)
            out.append(ArgumentDelta(self.parameter, text))

    def close_body(self) -> None:
        """Completes the value."""
        assert self.parameter is not None and self.body is not None
        self.arguments.setdefault(self.parameter, self.body.getvalue())
        self.parameter = None

    def check_complete(self, parameters: Mapping[str, Parameter]) -> None:
        """Marks the call as malformed if a required parameter is missing."""
        for name, parameter in parameters.items():
            if parameter.required and name not in self.arguments:
                self.reject(f"missing {name}")


class CallReader:
    """Parser of calls of one grammar: a state machine, advanced tag by tag. Appends events to `out`."""

    _call: OpenCall | None = None

    @property
    def in_call(self) -> bool:
        """Whether marks of reasoning are inside a call here, and so are text."""
        return self._call is not None

    def tags(self) -> WordSet | None:
        """The tags that are recognised in characters in the current state."""
        raise NotImplementedError

    def on_text(self, text: str, out: list[ParseEvent]) -> None:
        """Handles text without tags, outside of reasoning; never empty."""
        raise NotImplementedError

    def on_tag(self, name: str, out: list[ParseEvent]) -> bool:
        """Handles a tag; False if it is no tag in this state."""
        raise NotImplementedError

    def on_foreign_control(self, out: list[ParseEvent]) -> None:
        """Handles a control token that is no tag. Outside of calls it is ignored."""
        if self._call:
            self._call.fail("control token in a call")

    def on_reasoning_mark(self, out: list[ParseEvent]) -> None:
        """Reasoning begins or ends, outside of any call. Most readers have no open state there."""

    def end(self, out: list[ParseEvent]) -> None:
        """Ends the message: a call still open is malformed."""
        raise NotImplementedError

    def _start(self, call: OpenCall, out: list[ParseEvent]) -> OpenCall:
        self._call = call
        out.append(CallStarted(call.name))
        return call

    def _finish(self, out: list[ParseEvent]) -> None:
        call = self._call
        assert call is not None
        values = call.values if call.unfit else None
        out.append(CallFinished(ToolCall(call.name, call.arguments, call.error), call.unfit, values))
        self._call = None


@dataclass(frozen=True, slots=True)
class ParserMode:
    """What is recognised in characters, besides control tokens."""

    text_mode: bool
    reasoning: ReasoningMarks

    def outside(self, tags: Iterable[str]) -> WordSet | None:
        """Words recognised outside of calls: these tags, the marks of reasoning, or none."""
        found = [*(tags if self.text_mode else ()), *(THINK_MARKS if self.reasoning == "text" else ())]
        return WordSet(found) if found else None


_CLOSING_MARK = WordSet([THINK_CLOSE])


class MessageParser:
    """Parses one message of the agent piece by piece, and emits events as soon as they are decided.

    `finish_events` is called once, at the end. Takes time linear in the message, however it is split. Never
    raises, whatever the pieces are.
    """

    def __init__(self, reader: CallReader, reasoning: ReasoningMarks, begun: bool, channels: bool) -> None:
        self._reader = reader
        self._reasoning = reasoning
        self._thinking = begun and reasoning != "off"
        self._channels = ChannelMarks() if channels else None
        self._held = ""

    def feed_events(self, piece: Piece) -> list[ParseEvent]:
        """The events that this piece adds. Only text that may become a tag is held back."""
        out: list[ParseEvent] = []
        for part in (piece,) if self._channels is None else self._channels.translate(piece):
            if isinstance(part, str):
                self._parse_text(part, out)
            else:
                self._release(out)
                if not self._handle_tag(part.name, out):
                    self._reader.on_foreign_control(out)
        return out

    def finish_events(self) -> list[ParseEvent]:
        """Events of held-back text, and of unclosed calls, which are malformed. Nothing may be fed after."""
        out: list[ParseEvent] = []
        if self._channels is not None:
            self._parse_text("".join(self._channels.header or ()), out)
        self._release(out)
        self._reader.end(out)
        return out

    def _release(self, out: list[ParseEvent]) -> None:
        held, self._held = self._held, ""
        self._deliver(held, out)

    def _tags(self) -> WordSet | None:
        if not self._thinking:
            return self._reader.tags()
        return _CLOSING_MARK if self._reasoning == "text" else None

    def _parse_text(self, piece: str, out: list[ParseEvent]) -> None:
        text = self._held + piece if self._held else piece
        self._held = ""
        position = 0
        while (tags := self._tags()) is not None:
            found = tags.find(text, position)
            if found is None:
                kept = tags.partial_start(text, position)
                self._held = text[kept:]
                text = text[:kept]
                break
            start, end = found
            self._deliver(text[position:start], out)
            if not self._handle_tag(text[start:end], out):
                self._deliver(text[start:end], out)
            position = end
        self._deliver(text[position:], out)

    def _deliver(self, text: str, out: list[ParseEvent]) -> None:
        if not text:
            return
        if self._thinking:
            out.append(ReasoningDelta(text))
        else:
            self._reader.on_text(text, out)

    def _handle_tag(self, name: str, out: list[ParseEvent]) -> bool:
        if self._thinking:
            if name == THINK_CLOSE:
                self._thinking = False
            else:
                out.append(ReasoningDelta(name))
            return True
        if name in THINK_MARKS and self._reasoning != "off":
            if self._reader.in_call:
                self._reader.on_text(name, out)
            else:
                self._reader.on_reasoning_mark(out)
                self._thinking = name == THINK_OPEN
            return True
        return self._reader.on_tag(name, out)


class Grammar:
    """A syntax of calls for a set of tools: renders and parses them. Independent of tokenizers and files."""

    numbers_restart = False
    """Whether call numbers restart with every answer, for families that number calls."""

    def __init__(self, name: str, tools: Sequence[ToolSchema], tags: Sequence[str]) -> None:
        """`tags`: the result of `control_tokens`."""
        self.name = name
        self.tools = tuple(tools)
        self._tags = dict.fromkeys(tags)
        self._table: ToolTable = {tool.name: {p.name: p for p in tool.parameters} for tool in tools}
        self._tag_pattern = re.compile(f"({'|'.join(map(re.escape, [*tags, *THINK_MARKS]))})")
        self._readers: dict[ParserMode, Callable[[], CallReader]] = {}

    def control_tokens(self) -> list[str]:
        """Every tag that a tokenizer may hold as one control token, in a fixed order."""
        return list(self._tags)

    def announce(self, schemas: Sequence[ToolSchema]) -> list[Piece] | None:
        """The text of a system message that announces these tools. None: the model's own chat template
        announces them."""
        return None

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool, num_before: int = 0) -> list[Piece]:
        """Consecutive calls as the model would write them, with the separator before the first.
        `behind_words`: text or another call precedes them in the answer. `num_before`: calls earlier in the
        conversation, since some families number them."""
        raise NotImplementedError

    def split(self, text: str) -> list[Piece]:
        """Splits text of a *scripted* author; tags of these tools and marks of reasoning become control
        tokens. Never for text from outside."""
        parts = self._tag_pattern.split(text)  # every second one is a tag
        return join_text(Control(part) if place % 2 else part for place, part in enumerate(parts))

    def parser(
        self,
        text_mode: bool,
        reasoning: ReasoningMarks | None = None,
        begun: bool = False,
        channels: bool = False,
    ) -> MessageParser:
        """A new parser for one message. In text mode tags are recognised in ordinary characters.

        `reasoning`: how its marks are recognised; by default like the tags. `begun`: the prompt ended with
        `<think>`, so the message begins with reasoning. `channels`: it consists of parts with headers.
        """
        mode = ParserMode(text_mode, reasoning or ("text" if text_mode else "control"))
        if mode not in self._readers:
            self._readers[mode] = self._reader(mode)
        return MessageParser(self._readers[mode](), mode.reasoning, begun, channels)

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        """A factory of call readers, one for each message."""
        raise NotImplementedError


def parse_calls(parser: MessageParser, pieces: Sequence[Piece]) -> list[ToolCall]:
    """All calls of one whole message."""
    return list(collect(parse_events(parser, pieces)).calls)


def parse_events(parser: MessageParser, pieces: Sequence[Piece]) -> list[ParseEvent]:
    """All events of one whole message."""
    events: list[ParseEvent] = []
    for piece in pieces:
        events += parser.feed_events(piece)
    return events + parser.finish_events()
