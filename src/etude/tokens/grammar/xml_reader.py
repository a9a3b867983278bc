"""The state of calls in the XML grammar, told tag by tag.

    outside --<tool>--> in a call --<parameter>--> in a body
       ^------</tool>------|  ^------</parameter>------|

Anything else is a malformed call: it becomes a ToolCall with `error`, in a few words for the agent.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.records import ToolCall
from etude.tokens.grammar.events import ArgumentDelta, CallFinished, CallStarted, ParseEvent, TextDelta
from etude.tokens.grammar.interface import Parameter, ToolSchema, ToolTable
from etude.tokens.grammar.message_parser import CallReader, ParserMode, TagSet

_OPENING_AT_END = re.compile(r"<([a-z_][a-z0-9_]{0,31})>\s{0,8}\Z")
_TAIL_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class TagInfo:
    """One tag: whose it is, and whether it opens or closes."""

    name: str
    closing: bool
    of_tool: bool


TagInfos = Mapping[str, TagInfo]
"""By the tag as it is written."""


def tag_infos(tools: Sequence[ToolSchema]) -> TagInfos:
    """Opening and closing tag of every tool, then of every parameter."""
    names = [(tool.name, True) for tool in tools]
    names += [(parameter.name, False) for tool in tools for parameter in tool.parameters]
    return {
        f"<{slash}{name}>": TagInfo(name, closing=bool(slash), of_tool=of_tool)
        for name, of_tool in names
        for slash in ("", "/")
    }


class TagSets:
    """Which tags are recognised in characters, by the state that a message is in."""

    def __init__(self, infos: TagInfos, mode: ParserMode) -> None:
        spelled = infos if mode.text_mode else {}
        self.outside = mode.outside(list(infos))
        self.in_call = TagSet(spelled) if spelled else None
        self.in_unknown_call = TagSet(spelled, any_closing=True)
        closings = {info.name: tag for tag, info in spelled.items() if info.closing and not info.of_tool}
        self.in_body = {name: TagSet([tag]) for name, tag in closings.items()}


@dataclass(slots=True)
class OpenCall:
    """One call being read, with values as raw text."""

    name: str
    known: bool = True
    error: str | None = None
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    parameter: str | None = None
    body: io.StringIO | None = None
    padded: bool = True
    """Whether one newline at each end of the body is layout."""
    fresh: bool = True
    """Nothing of a padded body has come: a newline now is layout."""
    newline: bool = False
    """The body so far ends with a newline, which is layout if the body ends here."""
    kept: bool = True
    """Whether the body will be an argument."""

    def fail(self, message: str) -> None:
        """Only the first thing wrong is told: what follows is mostly its consequence."""
        self.error = self.error or message

    def open_body(self, parameter: str, padded: bool = True) -> None:
        """The text from now on is the value of `parameter`; a second value of one parameter is not kept."""
        self.parameter = parameter
        self.body = io.StringIO()
        self.padded = self.fresh = padded
        self.newline = False
        self.kept = parameter not in self.arguments

    def add_text(self, text: str, out: list[ParseEvent]) -> None:
        """Appends to the body; of a padded one without a newline at each end."""
        if self.fresh:
            self.fresh = False
            text = text.removeprefix("\n")
        if not text or not self.kept:
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
        if self.kept:
            self.arguments[self.parameter] = self.body.getvalue()
        self.parameter = None

    def check_complete(self, parameters: Mapping[str, Parameter]) -> None:
        """A call that lacks one of these that it needs is malformed."""
        for name, parameter in parameters.items():
            if parameter.required and name not in self.arguments:
                self.fail(f"missing {name}")

    def finished(self) -> CallFinished:
        """The event that ends the call."""
        return CallFinished(ToolCall(self.name, self.arguments, self.error))


class XmlReader(CallReader):
    """Reads the calls of one message."""

    def __init__(self, tools: ToolTable, infos: TagInfos, sets: TagSets) -> None:
        self._tools = tools
        self._infos = infos
        self._sets = sets
        self._call: OpenCall | None = None
        self._tail = ""
        """The end of the text since the last tag, outside of any call."""

    @property
    def in_call(self) -> bool:
        """A nameless call (a parameter's tag that strayed) ends with its parameter."""
        return self._call is not None and (bool(self._call.name) or self._call.parameter is not None)

    def tags(self) -> TagSet | None:
        """In a body only its own closing tag is one."""
        call = self._call
        if call is None:
            return self._sets.outside
        if call.parameter is not None:
            return self._sets.in_body.get(call.parameter)
        if not call.name:
            return self._sets.outside
        return self._sets.in_call if call.known else self._sets.in_unknown_call

    def take_text(self, text: str, out: list[ParseEvent]) -> None:
        """Part of a body, blanks between parameters, or free text."""
        call = self._call
        if call and call.parameter is not None:
            call.add_text(text, out)
        elif call and call.name:
            if not text.isspace():
                call.fail("text outside of parameters")
        else:
            out.append(TextDelta(text))
            self._tail = (self._tail + text[-_TAIL_CHARACTERS:])[-_TAIL_CHARACTERS:]

    def take_foreign(self, out: list[ParseEvent]) -> None:
        """A control token that is no tag. Outside of calls it is as harmless as text."""
        if self._call:
            self._call.fail("control token in a call")

    def take_mark(self, out: list[ParseEvent]) -> None:
        """Reasoning is no part of a nameless call."""
        if self._call:
            self._emit(out)
        self._tail = ""

    def take_tag(self, name: str, out: list[ParseEvent]) -> bool:
        """Takes a tag of the tools, or what closes the call of an unknown tool."""
        call = self._call
        tag = self._infos.get(name)
        if tag is None:
            if call and not call.known and call.name and name == f"</{call.name}>" and not call.parameter:
                self._emit(out)
                return True
            return False
        if call and call.parameter is not None:
            if tag.closing and tag.name == call.parameter:
                call.close_body()
                return True
            call.fail(f"unclosed {call.parameter}")
            call.parameter = None
        if tag.of_tool:
            self._take_tool_tag(tag, out)
        else:
            self._take_parameter_tag(tag, out)
        self._tail = ""
        return True

    def end(self, out: list[ParseEvent]) -> None:
        """What the end of the message leaves open is a malformed call."""
        if self._call:
            self._call.fail(f"unclosed {self._call.parameter or self._call.name}")
            self._emit(out)

    def _take_tool_tag(self, tag: TagInfo, out: list[ParseEvent]) -> None:
        call = self._call
        if not tag.closing:
            if call:
                call.fail(f"unclosed {call.name}")
                self._emit(out)
            self._start(OpenCall(tag.name), out)
        elif call is None:
            self._start(OpenCall(tag.name, error=f"stray /{tag.name}"), out)
            self._emit(out)
        else:
            if call.name == tag.name:
                call.check_complete(self._tools[call.name])
            else:
                call.fail(f"{call.name} closed by /{tag.name}")
            self._emit(out)

    def _take_parameter_tag(self, tag: TagInfo, out: list[ParseEvent]) -> None:
        call = self._call
        if call is None:
            call = self._start(_stray(tag, self._tail), out)
        elif tag.closing:
            call.fail(f"stray /{tag.name}")
        elif call.known and tag.name not in self._tools[call.name]:
            call.fail(f"unknown parameter {tag.name}")
        elif tag.name in call.arguments:
            call.fail(f"repeated {tag.name}")
        if not tag.closing:
            call.open_body(tag.name)

    def _start(self, call: OpenCall, out: list[ParseEvent]) -> OpenCall:
        self._call = call
        out.append(CallStarted(call.name))
        return call

    def _emit(self, out: list[ParseEvent]) -> None:
        assert self._call is not None
        out.append(self._call.finished())
        self._call = None
        self._tail = ""


def _stray(tag: TagInfo, before: str) -> OpenCall:
    """A parameter's tag outside of any call: the call of an unknown tool, or of none."""
    opening = _OPENING_AT_END.search(before)
    if opening and not tag.closing:
        name = opening[1]
        return OpenCall(name, known=False, error=f"unknown tool {name}")
    slash = "/" if tag.closing else ""
    return OpenCall("", known=False, error=f"stray {slash}{tag.name}")
