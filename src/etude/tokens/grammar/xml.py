"""Calls as tags with raw bodies: `<read_file><path>lib/tally.py</path></read_file>`.

    message   = { free text | reasoning | call }
    reasoning = "<think>" any text "</think>"
    call      = "<tool>" { blanks | parameter } blanks "</tool>"
    parameter = "<name>" body "</name>"
    body      = any text, never escaped

If a body starts with a newline, that one newline is dropped; if the rest ends with a newline, that one is
dropped as well. So `<text>` and `</text>` may be on lines of their own, and `render_call` doubles a newline
that belongs to the value. Every body is text; for an array or object it is the JSON text.

**Token mode** (the tokenizer holds each tag as one control token): only control tokens are tags. A tag
spelled in characters is text, so code may contain anything.

**Text mode** (tokenizers of other models): tags are recognised in text. A body ends at the first closing
tag of its own parameter and nothing else ends it: a value that contains this closing tag cannot be carried.

Reading goes from state to state:

    outside --<tool>--> in a call --<parameter>--> in a body
       ^------</tool>------|  ^------</parameter>------|

Anything else is a malformed call: it becomes a ToolCall with a short `error` for the agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens.grammar.channels import THINK_MARKS
from etude.tokens.grammar.events import ParseEvent, TextDelta
from etude.tokens.grammar.interface import Parameter, ToolSchema, ToolTable
from etude.tokens.grammar.message_parser import CallReader, Grammar, OpenCall, ParserMode, WordSet
from etude.tokens.pieces import Control, Piece, join_text, spell

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_OPENING_AT_END = re.compile(r"<([a-z_][a-z0-9_]{0,31})>\s{0,8}\Z")
_TAIL_CHARACTERS = 48
_HEAD = """You are a coding agent. You work on the files of one workspace, with tools.
Call a tool by writing its tags, anywhere in your message; several calls in one message are fine.
Text between the tags is taken as it stands: never escape it. Results come with the next message."""
_HINTS = {
    "number": "a number",
    "boolean": "true or false",
    "array": "a JSON array",
    "object": "a JSON object",
}


class XmlGrammar(Grammar):
    """The grammar above for a fixed set of tools.

    Raises ConfigError if a name cannot be a tag, or names both a tool and a parameter.
    """

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        own, parameters = [tool.name for tool in tools], [p.name for tool in tools for p in tool.parameters]
        _check_names(own, parameters)
        tags = [tag for name in (*own, *parameters) for tag in (f"<{name}>", f"</{name}>")]
        super().__init__("xml", tools, tags)

    def announce(self, schemas: Sequence[ToolSchema]) -> list[Piece]:
        """Describes how to call each tool, by example."""
        return ["\n\n".join([_HEAD, *(self._describe(schema) for schema in schemas)])]

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool, num_before: int = 0) -> list[Piece]:
        """The calls, one after the other."""
        return [piece for call in calls for piece in self.render_call(call)]

    def render_call(self, call: ToolCall) -> list[Piece]:
        """The call with its arguments in the given order; one of these tools parses back to an equal call."""
        pieces = [self._tag(f"<{call.name}>")]
        for name, value in call.arguments.items():
            pieces += [self._tag(f"<{name}>"), pad_body(value), self._tag(f"</{name}>")]
        return join_text([*pieces, self._tag(f"</{call.name}>")])

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        return partial(XmlReader, self._table, self._tags, TagSets(self._tags, self._table, mode))

    def _tag(self, tag: str) -> Piece:
        """A tag of these tools as a control token; any other name may come from outside, and is text."""
        return Control(tag) if tag in self._tags else tag

    def _describe(self, schema: ToolSchema) -> str:
        example = {parameter.name: f"{{{parameter.name}}}" for parameter in schema.parameters}
        lines = [schema.description, spell(self.render_call(ToolCall(schema.name, example)))]
        return "\n".join([*lines, *(_describe_parameter(parameter) for parameter in schema.parameters)])


def pad_body(value: str) -> str:
    """Doubles a newline at the value's start and at its end, since parsing drops one each."""
    return ("\n" if value.startswith("\n") else "") + value + ("\n" if value.endswith("\n") else "")


def _describe_parameter(parameter: Parameter) -> str:
    words = [f"- {parameter.name}: {parameter.description}"]
    if parameter.enum:
        texts = (value if isinstance(value, str) else json.dumps(value) for value in parameter.enum)
        words.append(f"(one of: {', '.join(texts)})")
    elif hint := _HINTS.get(parameter.kind):
        schema = f" of schema {json.dumps(parameter.schema)}" if parameter.schema else ""
        words.append(f"({hint}{schema})")
    if not parameter.required:
        words.append("(optional)")
    return " ".join(words)


def _check_names(tools: Sequence[str], parameters: Sequence[str]) -> None:
    both = set(tools) & set(parameters)
    reserved = {name for name in [*tools, *parameters] if f"<{name}>" in THINK_MARKS}
    wrong = [name for name in [*tools, *parameters] if not _NAME.match(name)]
    if len(set(tools)) != len(tools) or both or wrong or reserved:
        raise ConfigError(
            "tool and parameter names must be distinct and lower_snake_case, and none may be `think`",
            field="tools",
            received=sorted({*both, *wrong, *reserved}) or list(tools),
            fix="rename the tool or the parameter",
        )


class TagSets:
    """The tags that are recognised in characters, by the state of the parser."""

    def __init__(self, tags: Collection[str], tools: ToolTable, mode: ParserMode) -> None:
        spelled = tags if mode.text_mode else ()
        self.outside = mode.outside(tags)
        self.in_call = WordSet(spelled) if spelled else None
        self.in_unknown_call = WordSet(spelled, any_closing=True)
        names = {name for parameters in tools.values() for name in parameters} if spelled else ()
        self.in_body = {name: WordSet([f"</{name}>"]) for name in names}


class XmlReader(CallReader):
    """Reads the calls of one message."""

    def __init__(self, tools: ToolTable, tags: Collection[str], sets: TagSets) -> None:
        self._tools = tools
        self._tags = tags
        self._sets = sets
        self._tail = ""
        """The end of the text since the last tag, outside of any call."""

    @property
    def in_call(self) -> bool:
        """See CallReader. A nameless call (from a stray parameter tag) ends with its parameter."""
        return self._call is not None and (bool(self._call.name) or self._call.parameter is not None)

    def tags(self) -> WordSet | None:
        """In a body only its own closing tag is a tag."""
        call = self._call
        if call is None:
            return self._sets.outside
        if call.parameter is not None:
            return self._sets.in_body.get(call.parameter)
        if not call.name:
            return self._sets.outside
        return self._sets.in_call if call.known else self._sets.in_unknown_call

    def on_text(self, text: str, out: list[ParseEvent]) -> None:
        """Handles part of a body, blanks between parameters, or free text."""
        call = self._call
        if call and call.parameter is not None:
            call.add_text(text, out)
        elif call and call.name:
            if not text.isspace():
                call.fail("text outside of parameters")
        else:
            out.append(TextDelta(text))
            self._tail = (self._tail + text[-_TAIL_CHARACTERS:])[-_TAIL_CHARACTERS:]

    def on_reasoning_mark(self, out: list[ParseEvent]) -> None:
        """Ends a nameless call, which never contains reasoning."""
        if self._call:
            self._finish(out)
        self._tail = ""

    def on_tag(self, name: str, out: list[ParseEvent]) -> bool:
        """Handles a tag of the tools, or the tag that closes the call of an unknown tool."""
        call = self._call
        if name not in self._tags:
            if call and not call.known and call.name and name == f"</{call.name}>" and not call.parameter:
                self._finish(out)
                self._tail = ""
                return True
            return False
        named, closing = name.strip("</>"), name.startswith("</")
        if call and call.parameter is not None:
            if closing and named == call.parameter:
                call.close_body()
                return True
            call.fail(f"unclosed {call.parameter}")
            call.parameter = None
        handle = self._handle_tool_tag if named in self._tools else self._handle_parameter_tag
        handle(named, closing, out)
        self._tail = ""
        return True

    def end(self, out: list[ParseEvent]) -> None:
        """Ends the message: a call still open is malformed."""
        if self._call:
            self._call.fail(f"unclosed {self._call.parameter or self._call.name}")
            self._finish(out)

    def _handle_tool_tag(self, tool: str, closing: bool, out: list[ParseEvent]) -> None:
        call = self._call
        if not closing:
            if call:
                call.fail(f"unclosed {call.name}")
                self._finish(out)
            self._start(OpenCall(tool), out)
        elif call is None:
            self._start(OpenCall(tool, error=f"stray /{tool}"), out)
            self._finish(out)
        else:
            if call.name == tool:
                call.check_complete(self._tools[call.name])
            else:
                call.fail(f"{call.name} closed by /{tool}")
            self._finish(out)

    def _handle_parameter_tag(self, parameter: str, closing: bool, out: list[ParseEvent]) -> None:
        call = self._call
        if call is None:
            call = self._start(_stray(parameter, closing, self._tail), out)
        elif closing:
            call.fail(f"stray /{parameter}")
        elif call.known and parameter not in self._tools[call.name]:
            call.reject(f"unknown parameter {parameter}")
        elif parameter in call.arguments:
            call.fail(f"repeated {parameter}")
        if not closing:
            call.open_body(parameter)


def _stray(parameter: str, closing: bool, before: str) -> OpenCall:
    """The malformed call for a parameter's tag outside of any call: of an unknown tool, or nameless."""
    opening = _OPENING_AT_END.search(before)
    if opening and not closing:
        name = opening[1]
        return OpenCall(name, known=False, error=f"unknown tool {name}")
    slash = "/" if closing else ""
    return OpenCall("", known=False, error=f"stray {slash}{parameter}")
