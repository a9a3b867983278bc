"""Calls as JSON between two tags, as Hermes and Qwen models write them.

    <tool_call>
    {"name": "read_file", "arguments": {"path": "lib/tally.py", "offset": 3}}
    </tool_call>

A message holds any number of calls, with free text and `<think>` reasoning between and before them. `name`
and `arguments` may come in either order; a tool without required parameters may leave `arguments` out.
Strings become the text of `ToolCall.arguments` as they mean; any other value as it is written.

**Token mode** (the tokenizer holds both tags as tokens, special or not): only these tokens are tags, so a
value may hold their characters.

**Text mode**: tags are recognised in text wherever they stand, strings included: a value that contains one
is written with its `<` escaped (`\\u003c`). `render_call` does so in both modes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from etude.records import ToolCall
from etude.tokens.grammar.hermes_reader import CALL_CLOSE, CALL_OPEN, CALL_TAGS, HermesReader
from etude.tokens.grammar.interface import Kind, ToolSchema, check_names
from etude.tokens.grammar.json_reader import check_json
from etude.tokens.grammar.message_parser import CallReader, Grammar, ParserMode, TagSet
from etude.tokens.pieces import Control, Piece, join_text

BEFORE_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
AFTER_TOOLS = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""  # noqa: E501  (the words that these models were trained with)


class HermesGrammar(Grammar):
    """The grammar above for a fixed set of tools.

    `told_by_template`: the model's own chat template announces them, in words of its own. Raises ConfigError
    if a name is empty, too long, unprintable or given twice.
    """

    def __init__(self, tools: Sequence[ToolSchema], told_by_template: bool = False) -> None:
        check_names(tools, CALL_TAGS)
        super().__init__("hermes_told" if told_by_template else "hermes", tools, CALL_TAGS)

    def announce(self, schemas: Sequence[ToolSchema]) -> list[Piece] | None:
        """The tools in the words of Qwen's chat template; its example of the tags as control tokens."""
        if self.name != "hermes":
            return None
        lines = [json.dumps(schema.function_schema(), ensure_ascii=False) for schema in schemas]
        listed = "\n".join([BEFORE_TOOLS, *lines])
        return join_text([listed, *self.split(AFTER_TOOLS)])

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool) -> list[Piece]:
        """The calls, each on lines of its own."""
        pieces = [piece for call in calls for piece in ("\n", *self.render_call(call))]
        return join_text(pieces if behind_words else pieces[1:])

    def render_call(self, call: ToolCall) -> list[Piece]:
        """The call with its arguments in the given order; a well-typed call parses back equal."""
        kinds: Mapping[str, Kind] = {n: p.kind for n, p in self._table.get(call.name, {}).items()}
        arguments = (
            f"{json.dumps(name, ensure_ascii=False)}: {_render_value(value, kinds.get(name, 'string'))}"
            for name, value in call.arguments.items()
        )
        name = json.dumps(call.name, ensure_ascii=False)
        body = f'{{"name": {name}, "arguments": {{{", ".join(arguments)}}}}}'
        for tag in CALL_TAGS:
            body = body.replace(tag, "\\u003c" + tag[1:])
        return [Control(CALL_OPEN), f"\n{body}\n", Control(CALL_CLOSE)]

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        in_call = TagSet(CALL_TAGS) if mode.text_mode else None
        return partial(HermesReader, self._table, mode.outside(CALL_TAGS), in_call)


def _render_value(text: str, kind: Kind) -> str:
    """JSON of an argument: as it stands if it is JSON of its kind, else as a string (an error to be seen)."""
    if kind != "string":
        stripped = text.strip()
        found, error = check_json(stripped)
        if error is None and (found == kind or (found, kind) == ("integer", "number")):
            return stripped
    return json.dumps(text, ensure_ascii=False)
