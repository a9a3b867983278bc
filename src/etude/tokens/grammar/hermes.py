"""Calls as JSON between two tags, as Hermes and Qwen models write them.

    <tool_call>
    {"name": "read_file", "arguments": {"path": "lib/tally.py", "offset": 3}}
    </tool_call>

A message holds any number of calls, with free text and `<think>` reasoning between and before them. `name`
and `arguments` may come in either order; a tool without required parameters may leave `arguments` out.
Strings are decoded into the text of `ToolCall.arguments`; any other value stays as written.

**Token mode** (the tokenizer holds both tags as tokens, special or not): only these tokens are tags, so a
value may hold their characters.

**Text mode**: tags are recognised anywhere in text, strings included: a value that contains one
is written with its `<` escaped (`\\u003c`). `render_call` does so in both modes.

Anything that is not one well-formed call of a known tool becomes a ToolCall with a short `error` for the
agent. Arguments that were read before the fault are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from etude.records import ToolCall
from etude.tokens.grammar.events import ArgumentDelta, CallStarted, ParseEvent, TextDelta
from etude.tokens.grammar.interface import MAX_NAME_CHARACTERS, Kind, ToolSchema, ToolTable, check_names
from etude.tokens.grammar.json_reader import JsonFault, JsonReader, JsonSink, check_json, printable
from etude.tokens.grammar.message_parser import CallReader, Grammar, OpenCall, ParserMode, WordSet
from etude.tokens.pieces import Control, Piece, join_text

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
CALL_TAGS = (CALL_OPEN, CALL_CLOSE)
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

    `announced_by_template`: the model's own chat template announces them, with text of its own. Raises
    ConfigError if a name is empty, too long, unprintable or given twice.
    """

    def __init__(self, tools: Sequence[ToolSchema], announced_by_template: bool = False) -> None:
        check_names(tools, CALL_TAGS)
        super().__init__("hermes_told" if announced_by_template else "hermes", tools, CALL_TAGS)

    def announce(self, schemas: Sequence[ToolSchema]) -> list[Piece] | None:
        """The tools as Qwen's chat template announces them; the tags of its example are control tokens."""
        if self.name != "hermes":
            return None
        lines = [json.dumps(schema.function_schema(), ensure_ascii=False) for schema in schemas]
        listed = "\n".join([BEFORE_TOOLS, *lines])
        return join_text([listed, *self.split(AFTER_TOOLS)])

    def render_calls(self, calls: Sequence[ToolCall], behind_words: bool, num_before: int = 0) -> list[Piece]:
        """The calls, each on lines of its own."""
        pieces = [piece for call in calls for piece in ("\n", *self.render_call(call))]
        return join_text(pieces if behind_words else pieces[1:])

    def render_call(self, call: ToolCall) -> list[Piece]:
        """The call with its arguments in the given order; a well-typed call parses back equal."""
        name = json.dumps(call.name, ensure_ascii=False)
        body = f'{{"name": {name}, "arguments": {render_arguments(call, self._table)}}}'
        return [Control(CALL_OPEN), f"\n{without_tags(body, CALL_TAGS)}\n", Control(CALL_CLOSE)]

    def _reader(self, mode: ParserMode) -> Callable[[], CallReader]:
        in_call = WordSet(CALL_TAGS) if mode.text_mode else None
        return partial(HermesReader, self._table, mode.outside(CALL_TAGS), in_call)


def render_arguments(call: ToolCall, tools: ToolTable) -> str:
    """A call's arguments as a JSON object, in the given order."""
    kinds: Mapping[str, Kind] = {n: p.kind for n, p in tools.get(call.name, {}).items()}
    members = (
        f"{json.dumps(name, ensure_ascii=False)}: {_render_value(value, kinds.get(name, 'string'))}"
        for name, value in call.arguments.items()
    )
    return f"{{{', '.join(members)}}}"


def without_tags(body: str, tags: Iterable[str]) -> str:
    """Escapes tags in strings of a JSON text, so that none is spelled out."""
    for tag in tags:
        body = body.replace(tag, "\\u003c" + tag[1:])
    return body


def _render_value(text: str, kind: Kind) -> str:
    """JSON of an argument: unchanged if it is JSON of its kind, else a string (so that the error shows)."""
    if kind != "string":
        stripped = text.strip()
        found, error = check_json(stripped)
        if error is None and (found == kind or (found, kind) == ("integer", "number")):
            return stripped
    return json.dumps(text, ensure_ascii=False)


class JsonCall(JsonSink):
    """One call whose JSON is parsed incrementally: an object with its name and arguments."""

    def __init__(self, tools: ToolTable) -> None:
        self.call = OpenCall("")
        self._tools = tools
        self._json = JsonReader(self)
        self._out: list[ParseEvent] = []
        """Where events go; set for each piece."""
        self._is_named = False
        self._kinds: dict[str, str] = {}
        """Kinds of the arguments' values, by name."""
        self._member = self._argument = ""
        self._name: list[str] = []

    def feed(self, text: str, out: list[ParseEvent]) -> None:
        """Parses more of the JSON; ignores everything after a fault."""
        if self.call.error is None:
            self._out = out
            try:
                self._json.feed(text)
            except JsonFault as fault:
                self.call.fail(str(fault))

    def finish(self, out: list[ParseEvent]) -> None:
        """Ends the call and validates it; only the first error is kept."""
        self._out = out
        try:
            if self.call.error is None:
                self._json.end()
        except JsonFault as fault:
            self.call.fail(str(fault))
        self._check(self.call)
        if not self._is_named:
            self._start()

    def key(self, depth: int, key: str) -> None:
        """Begins a member of the call, or an argument."""
        if depth == 2:
            self._argument = key
            return
        self._member = key
        if key not in ("name", "arguments"):
            raise JsonFault(f"unknown key {printable(key)}")

    def begin(self, depth: int, kind: str) -> None:
        """Begins the value of a member or an argument."""
        if depth == 2:
            self._kinds[self._argument] = kind
            self.call.open_body(self._argument, padded=False)
        elif depth == 0 and kind != "object":
            raise JsonFault("not a JSON object")
        elif self._member == "name" and kind != "string":
            raise JsonFault("name is not a string")
        elif self._member == "arguments" and kind != "object":
            raise JsonFault("arguments are not an object")

    def text(self, depth: int, text: str) -> None:
        """Adds to the name or to an argument."""
        if depth == 2:
            self.call.add_text(text, self._out if self._is_named else [])
        else:
            self._name.append(text)

    def end(self, depth: int) -> None:
        """Completes an argument, or the name."""
        if depth == 2:
            self.call.close_body()
        elif depth == 1 and self._member == "name":
            name = "".join(self._name)
            if len(name) > MAX_NAME_CHARACTERS:
                raise JsonFault("name too long")
            self.call.name, self._is_named = name, True
            self._start()

    def _start(self) -> None:
        """Emits the call's start, and the arguments that came before its name."""
        self._out.append(CallStarted(self.call.name))
        arguments = self.call.arguments.items()
        self._out.extend(ArgumentDelta(name, text) for name, text in arguments if text)

    def _check(self, call: OpenCall) -> None:
        parameters = self._tools.get(call.name)
        if not self._is_named or parameters is None:
            call.fail(f"unknown tool {printable(call.name)}" if self._is_named else "missing name")
            return
        for name in call.arguments:
            if name not in parameters:
                call.reject(f"unknown parameter {printable(name)}")
        for name, parameter in parameters.items():
            kind = self._kinds.get(name)
            if kind is None:
                if parameter.required:
                    call.reject(f"missing {printable(name)}")
            elif kind == "null":
                call.reject(f"{printable(name)} is null" + ("" if parameter.required else ": leave it out"))
            elif kind != parameter.kind and (kind, parameter.kind) != ("integer", "number"):
                article = "an" if parameter.kind in ("integer", "array", "object") else "a"
                call.reject(f"{printable(name)} is not {article} {parameter.kind}")
        if call.unfit:
            kinds, given = self._kinds, call.arguments.items()
            call.values = {n: text if kinds[n] == "string" else json.loads(text) for n, text in given}


class HermesReader(CallReader):
    """Reads the calls of one message."""

    def __init__(self, tools: ToolTable, outside: WordSet | None, in_call: WordSet | None) -> None:
        """`outside`, `in_call`: the tags recognised in characters outside and inside of calls."""
        self._tools = tools
        self._outside, self._in_call = outside, in_call
        self._json = JsonCall(tools)

    def tags(self) -> WordSet | None:
        """In text mode both tags are recognised everywhere: a value that holds one must escape its `<`."""
        return self._outside if self._call is None else self._in_call

    def on_text(self, text: str, out: list[ParseEvent]) -> None:
        """Handles part of a call's JSON, or free text."""
        if self._call is None:
            out.append(TextDelta(text))
        else:
            self._json.feed(text, out)

    def on_tag(self, name: str, out: list[ParseEvent]) -> bool:
        """Handles one of the two tags."""
        if name not in CALL_TAGS:
            return False
        if name == CALL_OPEN:
            self.end(out)
            self._json = JsonCall(self._tools)
            self._call = self._json.call
        elif self._call:
            self._finish(out)
        else:
            self._start(OpenCall("", error="stray /tool_call"), out)
            super()._finish(out)
        return True

    def end(self, out: list[ParseEvent]) -> None:
        """A call still open at the end of the message, or at the next call, is malformed."""
        if self._call:
            self._call.fail("unclosed tool_call")
            self._finish(out)

    def _finish(self, out: list[ParseEvent]) -> None:
        self._json.finish(out)
        super()._finish(out)
