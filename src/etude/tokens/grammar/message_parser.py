"""What all grammars share. The streaming parser finds tags, keeps reasoning apart and lets a reader judge.

    pieces --> [ channels' headers ] --> [ tags or text? ] --> reasoning                --> ReasoningDelta
                                                           --> the grammar's CallReader --> all other events

A call written inside reasoning is no call. Every character is searched once in each state that it is seen
in, and a state never looks back, so parsing takes linear time.
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
"""How `<think>` and `</think>` are recognised: as control tokens, in characters too, or not at all."""

_ANY_CLOSING = r"</[a-z_][a-z0-9_]{0,31}>"
_BEGUN_CLOSING = re.compile(r"</?(?:[a-z_][a-z0-9_]{0,31})?")
_LONGEST_ANY = 35


class WordSet:
    """Words that are recognised in characters, such as tags."""

    def __init__(self, words: Iterable[str], any_closing: bool = False) -> None:
        """Of words that begin at one place the first counts. `any_closing`: the closing tag of any name as
        well."""
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

    def undecided(self, text: str, position: int = 0) -> int:
        """Where the text's end begins that may become a word with what follows."""
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
    """See `CallFinished`, as for `values`."""
    values: Mapping[str, object] | None = None
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    parameter: str | None = None
    body: io.StringIO | None = None
    padded: bool = True
    """Whether one newline at each end of the body is layout."""
    fresh: bool = True
    """Nothing of a padded body has come: a newline now is layout."""
    newline: bool = False
    """The body so far ends with a newline, which is layout if the body ends here."""

    def fail(self, message: str) -> None:
        """Only the first thing wrong is reported: what follows is mostly its consequence."""
        self.error, self.unfit = self.error or message, False

    def misfit(self, message: str) -> None:
        """The call can be read, and its arguments are not what the tool takes."""
        if self.error is None:
            self.error, self.unfit = message, True

    def open_body(self, parameter: str, padded: bool = True) -> None:
        """The text from now on is the value of `parameter`; a second value of one parameter is not kept."""
        self.parameter = parameter
        self.body = io.StringIO()
        self.padded = self.fresh = padded
        self.newline = False

    def add_text(self, text: str, out: list[ParseEvent]) -> None:
        """Appends to the body; of a padded one without a newline at each end."""
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
        """The value is whole."""
        assert self.parameter is not None and self.body is not None
        self.arguments.setdefault(self.parameter, self.body.getvalue())
        self.parameter = None

    def check_complete(self, parameters: Mapping[str, Parameter]) -> None:
        """A call that lacks one of these that it needs is malformed."""
        for name, parameter in parameters.items():
            if parameter.required and name not in self.arguments:
                self.misfit(f"missing {name}")


class CallReader:
    """What differs between grammars: the state of calls, advanced tag by tag. Appends events to `out`."""

    _call: OpenCall | None = None

    @property
    def in_call(self) -> bool:
        """Whether marks of reasoning are part of a call here, and so mean nothing."""
        return self._call is not None

    def tags(self) -> WordSet | None:
        """The tags that are recognised in characters in the present state."""
        raise NotImplementedError

    def take_text(self, text: str, out: list[ParseEvent]) -> None:
        """Takes text without tags, outside of reasoning; never empty."""
        raise NotImplementedError

    def take_tag(self, name: str, out: list[ParseEvent]) -> bool:
        """Takes a tag; False if it is none here."""
        raise NotImplementedError

    def take_foreign(self, out: list[ParseEvent]) -> None:
        """Takes a control token that is no tag. Outside of calls it is as harmless as text."""
        if self._call:
            self._call.fail("control token in a call")

    def take_mark(self, out: list[ParseEvent]) -> None:
        """Reasoning begins or ends here, outside of any call: most readers have nothing open there."""

    def end(self, out: list[ParseEvent]) -> None:
        """The message is over: what it leaves open is a malformed call."""
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
    """What is recognised in characters, beside control tokens."""

    text_mode: bool
    reasoning: ReasoningMarks

    def outside(self, tags: Iterable[str]) -> WordSet | None:
        """What is recognised outside of calls: these tags, the marks of reasoning, or nothing."""
        found = [*(tags if self.text_mode else ()), *(THINK_MARKS if self.reasoning == "text" else ())]
        return WordSet(found) if found else None


_CLOSING_MARK = WordSet([THINK_CLOSE])


class MessageParser:
    """Takes one message of the agent piece by piece and tells what it says as soon as that is decided.

    At the end `finish_events` is called, once. Takes time linear in the message, however it is cut. Never
    raises, whatever the pieces are.
    """

    def __init__(self, reader: CallReader, reasoning: ReasoningMarks, begun: bool, channels: bool) -> None:
        self._reader = reader
        self._reasoning = reasoning
        self._thinking = begun and reasoning != "off"
        self._channels = ChannelMarks() if channels else None
        self._held = ""

    def feed_events(self, piece: Piece) -> list[ParseEvent]:
        """What this piece adds. Of text only a beginning that may become a tag is held back."""
        out: list[ParseEvent] = []
        for one in (piece,) if self._channels is None else self._channels.translate(piece):
            if isinstance(one, str):
                self._take_text(one, out)
            else:
                self._release(out)
                if not self._take_tag(one.name, out):
                    self._reader.take_foreign(out)
        return out

    def finish_events(self) -> list[ParseEvent]:
        """What was held back, and the calls left unclosed, as malformed calls. Ends the parser's life."""
        out: list[ParseEvent] = []
        if self._channels is not None:
            self._take_text("".join(self._channels.header or ()), out)
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

    def _take_text(self, piece: str, out: list[ParseEvent]) -> None:
        text = self._held + piece if self._held else piece
        self._held = ""
        position = 0
        while (tags := self._tags()) is not None:
            found = tags.find(text, position)
            if found is None:
                kept = tags.undecided(text, position)
                self._held = text[kept:]
                text = text[:kept]
                break
            start, end = found
            self._deliver(text[position:start], out)
            if not self._take_tag(text[start:end], out):
                self._deliver(text[start:end], out)
            position = end
        self._deliver(text[position:], out)

    def _deliver(self, text: str, out: list[ParseEvent]) -> None:
        if not text:
            return
        if self._thinking:
            out.append(ReasoningDelta(text))
        else:
            self._reader.take_text(text, out)

    def _take_tag(self, name: str, out: list[ParseEvent]) -> bool:
        if self._thinking:
            if name == THINK_CLOSE:
                self._thinking = False
            else:
                out.append(ReasoningDelta(name))
            return True
        if name in THINK_MARKS and self._reasoning != "off":
            if self._reader.in_call:
                self._reader.take_text(name, out)
            else:
                self._reader.take_mark(out)
                self._thinking = name == THINK_OPEN
            return True
        return self._reader.take_tag(name, out)


class Grammar:
    """How calls are written. Knows its tools; knows neither tokens nor files."""

    numbers_restart = False
    """Whether families that number calls begin anew with every answer."""

    def __init__(self, name: str, tools: Sequence[ToolSchema], tags: Sequence[str]) -> None:
        """`tags`: what `control_tokens` gives."""
        self.name = name
        self.tools = tuple(tools)
        self._tags = dict.fromkeys(tags)
        self._table: ToolTable = {tool.name: {one.name: one for one in tool.parameters} for tool in tools}
        self._tag_pattern = re.compile(f"({'|'.join(map(re.escape, [*tags, *THINK_MARKS]))})")
        self._readers: dict[ParserMode, Callable[[], CallReader]] = {}

    def control_tokens(self) -> list[str]:
        """Every tag that a tokenizer may hold as one control token, in a fixed order."""
        return list(self._tags)

    def announce(self, schemas: Sequence[ToolSchema]) -> list[Piece] | None:
        """What a system message says of these tools, for models that know the grammar or are to learn it.
        None: the model's own chat template says it."""
        return None

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool, num_before: int = 0) -> list[Piece]:
        """Calls that follow each other as their author would write them, with what stands before the first:
        behind words or another call, or at the beginning of an answer. `num_before`: of the conversation's
        calls, which some families number."""
        raise NotImplementedError

    def split(self, text: str) -> list[Piece]:
        """Text of a *scripted* author, the tags of these tools and the marks of reasoning as control tokens.
        Never for text from outside."""
        parts = self._tag_pattern.split(text)  # every second one is a tag
        return join_text(Control(part) if place % 2 else part for place, part in enumerate(parts))

    def parser(
        self,
        text_mode: bool,
        reasoning: ReasoningMarks | None = None,
        begun: bool = False,
        channels: bool = False,
    ) -> MessageParser:
        """A fresh parser for one message. In text mode tags are recognised in ordinary characters.

        `reasoning`: how its marks are recognised; by default like the tags. `begun`: the prompt ended with
        `<think>`, so the message begins with reasoning. `channels`: it comes in parts with headers.
        """
        mode = ParserMode(text_mode, reasoning or ("text" if text_mode else "control"))
        if mode not in self._readers:
            self._readers[mode] = self._reader(mode)
        return MessageParser(self._readers[mode](), mode.reasoning, begun, channels)

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        """What gives a reader of calls for each message."""
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
