"""The state of calls in the Hermes grammar: from the JSON between two tags to a ToolCall.

Anything that is not one well-formed call of a known tool becomes a ToolCall with `error`, in a few words for
the agent. Arguments that were read before the fault are kept.
"""

from __future__ import annotations

import io

from etude.records import ToolCall
from etude.tokens.grammar.events import ArgumentDelta, CallFinished, CallStarted, ParseEvent, TextDelta
from etude.tokens.grammar.interface import MAX_NAME_CHARACTERS, ToolTable
from etude.tokens.grammar.json_reader import JsonReader, JsonSink, printable
from etude.tokens.grammar.message_parser import CallReader, TagSet

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
CALL_TAGS = (CALL_OPEN, CALL_CLOSE)

_ARTICLES = {"integer": "an", "array": "an", "object": "an"}


class _OpenCall(JsonSink):
    """One call being read: the sink of its JSON."""

    def __init__(self, tools: ToolTable, out: list[ParseEvent]) -> None:
        self.json = JsonReader(self)
        self.out = out
        """Where events go; set anew for each piece."""
        self._tools = tools
        self._key = ""
        self._name_so_far = ""
        self._name: str | None = None
        self._started = False
        self._argument: str | None = None
        self._value = io.StringIO()
        self._kinds: dict[str, str] = {}
        self._arguments: dict[str, str] = {}

    def key(self, depth: int, key: str) -> None:
        """Which member of the call, or which argument, comes next."""
        if depth == 1:
            self._key = key
            if key not in ("name", "arguments"):
                self.json.fail(f"unknown key {printable(key)}")
        else:
            self._argument = key

    def begin(self, depth: int, kind: str) -> None:
        """A member's or an argument's value begins."""
        if depth == 0:
            if kind != "object":
                self.json.fail("not a JSON object")
        elif depth == 1:
            if self._key == "name" and kind != "string":
                self.json.fail("name is not a string")
            elif self._key == "arguments" and kind != "object":
                self.json.fail("arguments are not an object")
        else:
            assert self._argument is not None
            self._kinds[self._argument] = kind
            self._value = io.StringIO()

    def text(self, depth: int, text: str) -> None:
        """More of the name or of an argument."""
        if depth == 1:
            self._name_so_far += text[: MAX_NAME_CHARACTERS + 1]
            if len(self._name_so_far) > MAX_NAME_CHARACTERS:
                self.json.fail("name too long")
        elif depth == 2:
            assert self._argument is not None
            self._value.write(text)
            if self._started:
                self.out.append(ArgumentDelta(self._argument, text))

    def end(self, depth: int) -> None:
        """The name or an argument is whole."""
        if depth == 1 and self._key == "name":
            self._name = self._name_so_far
            self.start()
        elif depth == 2:
            assert self._argument is not None
            self._arguments[self._argument] = self._value.getvalue()
            self._argument = None

    def start(self) -> None:
        """Tells that the call has begun; arguments that came before its name are told now."""
        if self._started:
            return
        self._started = True
        self.out.append(CallStarted(self._name or ""))
        told = dict(self._arguments)
        if self._argument is not None:
            told[self._argument] = self._value.getvalue()
        self.out.extend(ArgumentDelta(name, text) for name, text in told.items() if text)

    def finish(self) -> ToolCall:
        """The call as far as it came, with the first thing that is wrong about it."""
        self.json.end()
        self._check()
        self.start()
        return ToolCall(self._name or "", self._arguments, self.json.error)

    def _check(self) -> None:
        fail = self.json.fail
        if self._name is None:
            fail("missing name")
            return
        parameters = self._tools.get(self._name)
        if parameters is None:
            fail(f"unknown tool {printable(self._name)}")
            return
        for name in self._arguments:
            if name not in parameters:
                fail(f"unknown parameter {printable(name)}")
        for name, parameter in parameters.items():
            kind = self._kinds.get(name)
            if kind is None:
                if parameter.required:
                    fail(f"missing {printable(name)}")
            elif kind == "null":
                fail(f"{printable(name)} is null" + ("" if parameter.required else ": leave it out"))
            elif kind != parameter.kind and (kind, parameter.kind) != ("integer", "number"):
                article = _ARTICLES.get(parameter.kind, "a")
                fail(f"{printable(name)} is not {article} {parameter.kind}")


class HermesReader(CallReader):
    """Reads the calls of one message."""

    def __init__(self, tools: ToolTable, outside: TagSet | None, in_call: TagSet | None) -> None:
        """`outside`, `in_call`: what is recognised in characters there."""
        self._tools = tools
        self._outside, self._in_call = outside, in_call
        self._call: _OpenCall | None = None

    @property
    def in_call(self) -> bool:
        """Marks of reasoning in a call are text of its JSON."""
        return self._call is not None

    def tags(self) -> TagSet | None:
        """In text mode the two tags count everywhere: a value that holds one must escape its `<`."""
        return self._outside if self._call is None else self._in_call

    def take_text(self, text: str, out: list[ParseEvent]) -> None:
        """Part of a call's JSON, or free text."""
        call = self._call
        if call is None:
            out.append(TextDelta(text))
            return
        call.out = out
        call.json.feed(text)

    def take_foreign(self, out: list[ParseEvent]) -> None:
        """A control token that is no tag. Outside of calls it is as harmless as text."""
        if self._call:
            self._call.json.fail("control token in a call")

    def take_tag(self, name: str, out: list[ParseEvent]) -> bool:
        """Takes one of the two tags."""
        if name not in CALL_TAGS:
            return False
        if name == CALL_OPEN:
            if self._call:
                self._call.json.fail("unclosed tool_call")
                self._emit(self._call, out)
            self._call = _OpenCall(self._tools, out)
        elif self._call:
            self._emit(self._call, out)
        else:
            out.append(CallStarted(""))
            out.append(CallFinished(ToolCall("", {}, "stray /tool_call")))
        return True

    def end(self, out: list[ParseEvent]) -> None:
        """What the end of the message leaves open is a malformed call."""
        if self._call:
            self._call.json.fail("unclosed tool_call")
            self._emit(self._call, out)

    def _emit(self, call: _OpenCall, out: list[ParseEvent]) -> None:
        call.out = out
        finished = call.finish()
        out.append(CallFinished(finished))
        self._call = None
