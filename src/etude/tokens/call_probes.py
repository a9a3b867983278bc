"""Probes a chat template with conversations that hold calls: whether it announces tools, writes calls and
shows results as sessions with a given grammar do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import ConfigError
from etude.records import ToolCall
from etude.tokens.chat_template import ChatTemplate, Message
from etude.tokens.grammar import Grammar, Parameter, ToolSchema
from etude.tokens.pieces import Piece, spell
from etude.tokens.renderer import Renderer
from etude.tokens.template import Template
from etude.tokens.tokenizer import Tokenizer

SYSTEM, USER, ANSWER, FIRST, SECOND = "Ssystemz", "Quserz", "Aanswerz", "Rfirstz", "Rsecondz"
PROBE_TOOLS = (
    ToolSchema(
        "look_up",
        "Looks it up.",
        (
            Parameter("key", "what"),
            Parameter("most", "n", False, "integer"),
            Parameter("deep", "whether", False, "boolean"),
            Parameter("rows", "which", False, "array", schema={"items": {"type": "integer"}}),
        ),
    ),
    ToolSchema("end", "Ends it."),
)
_ID = "call0000"
"""One digit follows: ids have nine characters, as Mistral's templates require."""
_NUMBERED_ID = "functions.look_up:"
"""The number follows: Kimi-K2's form of ids."""
_ARGUMENTS = {"key": "a ß", "most": 3, "deep": True, "rows": [1, 2]}
PROBE_CALL = ToolCall("look_up", {"key": "a ß", "most": "3", "deep": "true", "rows": "[1, 2]"})


def matches_grammar(
    jinja: ChatTemplate,
    frame: ChatTemplate,
    split: Callable[[str], tuple[Piece, ...]],
    tokenizer: Tokenizer,
    grammar: Grammar,
    template: Template,
) -> bool:
    """Whether the chat template announces tools and writes calls as sessions with this grammar do."""
    try:
        renderer = Renderer(tokenizer, grammar, template)
        return _writes_calls(jinja, frame, renderer) and _announces_tools(jinja, renderer, split)
    except ConfigError:  # the tokenizer lacks some of the tags, or the template fails
        return False


def _announces_tools(
    jinja: ChatTemplate, renderer: Renderer, split: Callable[[str], tuple[Piece, ...]]
) -> bool:
    """Whether the template announces tools as sessions do, with and without a system message, and all control
    tokens of the announcement come from its own text."""
    template, is_native = renderer.template, renderer.grammar.announce(()) is None
    for words in ("", SYSTEM):
        described = renderer.describe(words, PROBE_TOOLS)
        opening = renderer.tokenizer.decode(renderer.opening(described))
        if is_native and described != split(opening):
            return False
        if not all(tool.description in opening for tool in PROBE_TOOLS):
            return False
        talk = [*([chat_message("system", words)] if words else []), chat_message("user", USER)]
        answered = [*talk, chat_message("assistant", ANSWER), chat_message("user", FIRST)]
        functions = [tool.function_schema() for tool in PROBE_TOOLS]
        rendered = jinja.render(answered, functions)
        if not rendered.startswith(opening + spell(template.user) + USER):
            return False
    return True


def _writes_calls(jinja: ChatTemplate, frame: ChatTemplate, renderer: Renderer) -> bool:
    """Whether the template shows calls as the grammar writes them, with and without text before them, and
    in a second answer too."""
    template, grammar = renderer.template, renderer.grammar
    for words, count in itertools.product(("", ANSWER), (1, 2)):
        asked, is_numbered = [chat_message("user", USER)], bool(template.result_named)
        answer = {**chat_message("assistant", words)}
        begun: Sequence[Piece] = template.shown
        if template.thinking or template.shows_empty_reasoning:
            answer["reasoning_content"] = FIRST
            begun = (*template.reasoning_open, FIRST, *template.reasoning_close)
        messages: list[Message] = [*asked]
        for num_before in (0, count):
            calls = probe_calls(count, is_numbered, num_before)
            messages += [{**answer, "tool_calls": calls}, *probe_results(calls, [FIRST] * count, is_numbered)]
        rendered = jinja.render(messages)
        end = template.tool[:1] if template.openers_end else (template.shown_end or template.end,)
        once, again = (
            spell((*begun, words, *grammar.render_calls([PROBE_CALL] * count, bool(words), number), *end))
            for number in (0, count)
        )
        before = frame.render(asked).removesuffix(spell(template.thinking)) + once
        if not rendered.startswith(before) or again not in rendered.removeprefix(before):
            return False
    return True


def chat_message(role: str, content: str) -> dict[str, Any]:
    """A chat message."""
    return {"role": role, "content": content}


def names_its_call(frame: str) -> bool:
    """Whether a result's frame names its call, so that it differs for every call."""
    return PROBE_CALL.name in frame or _ID in frame


def probe_results(
    calls: Sequence[Mapping[str, Any]], outputs: Sequence[str], is_numbered: bool
) -> list[Message]:
    """The results of calls, with the tool's name unless ids are numbered, where it would change the role."""
    name = {} if is_numbered else {"name": PROBE_CALL.name}
    return [
        {"role": "tool", "tool_call_id": call["id"], **name, "content": output}
        for call, output in zip(calls, outputs, strict=True)
    ]


def probe_calls(count: int, is_numbered: bool, num_before: int = 0) -> list[Mapping[str, Any]]:
    """The calls of one answer, with ids in Kimi's form (numbered over the conversation) or Mistral's."""
    function = {"name": PROBE_CALL.name, "arguments": _ARGUMENTS}
    prefix = _NUMBERED_ID if is_numbered else _ID
    numbers = range(num_before, num_before + count)
    return [{"type": "function", "id": f"{prefix}{number}", "function": function} for number in numbers]
