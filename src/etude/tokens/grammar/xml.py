"""Calls as tags with raw bodies: `<read_file><path>lib/tally.py</path></read_file>`.

    message   = { free text | reasoning | call }
    reasoning = "<think>" any text "</think>"
    call      = "<tool>" { blanks | parameter } blanks "</tool>"
    parameter = "<name>" body "</name>"
    body      = any text, never escaped

If a body starts with a newline, that one newline is dropped; if what is left ends with a newline, that one
is dropped as well. So `<text>` and `</text>` may stand on lines of their own, and `render_call` doubles a
newline that belongs to the value. Every body is text; of an array or object it is the JSON text.

**Token mode** (the tokenizer holds each tag as one control token): only control tokens are tags. A tag
spelled in characters is text, so code may contain anything.

**Text mode** (tokenizers of other models): tags are recognised in text. A body ends at the first closing
tag of its own parameter and nothing else ends it: a value that contains this closing tag cannot be carried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens.grammar.interface import Parameter, ToolSchema
from etude.tokens.grammar.message_parser import THINK_MARKS, CallReader, Grammar, ParserMode
from etude.tokens.grammar.xml_reader import TagSets, XmlReader, tag_infos
from etude.tokens.pieces import Control, Piece, join_text, spell

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
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
        _check_names([tool.name for tool in tools], [p.name for tool in tools for p in tool.parameters])
        self._infos = tag_infos(tools)
        super().__init__("xml", tools, [*self._infos])

    def announce(self, schemas: Sequence[ToolSchema]) -> list[Piece]:
        """How to call each tool, by example."""
        return ["\n\n".join([_HEAD, *(self._describe(schema) for schema in schemas)])]

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool) -> list[Piece]:
        """The calls, one after the other."""
        return [piece for call in calls for piece in self.render_call(call)]

    def render_call(self, call: ToolCall) -> list[Piece]:
        """The call with its arguments in the given order; one of these tools parses back to an equal call."""
        pieces = [self._tag(f"<{call.name}>")]
        for name, value in call.arguments.items():
            pieces += [self._tag(f"<{name}>"), pad_body(value), self._tag(f"</{name}>")]
        return join_text([*pieces, self._tag(f"</{call.name}>")])

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        return partial(XmlReader, self._table, self._infos, TagSets(self._infos, mode))

    def _tag(self, tag: str) -> Piece:
        """A tag of these tools; any other name may come from outside, and is text."""
        return Control(tag) if tag in self._infos else tag

    def _describe(self, schema: ToolSchema) -> str:
        example = {parameter.name: f"{{{parameter.name}}}" for parameter in schema.parameters}
        lines = [schema.description, spell(self.render_call(ToolCall(schema.name, example)))]
        return "\n".join([*lines, *(_describe_parameter(parameter) for parameter in schema.parameters)])


def pad_body(value: str) -> str:
    """Doubles a newline at the value's start and at its end, of which parsing drops one each."""
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
