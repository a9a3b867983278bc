"""Chat templates of published models: Jinja text, rendered as transformers does, and generated for ours.

A template is third-party code: it runs in Jinja's sandbox, and its output is verified (`tokens.derived`)
before any conversation is rendered by it. It has no clock: a prompt that names the date would change every
day. One that requires a clock always gets the same date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import lru_cache, partial
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Const, Node, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.errors import ConfigError
from etude.tokens.grammar.hermes import AFTER_TOOLS, BEFORE_TOOLS
from etude.tokens.grammar.interface import ToolSchema
from etude.tokens.pieces import Control, Piece, join_text, spell
from etude.tokens.template import Template
from etude.tokens.tokenizer import Tokenizer

Message = Mapping[str, Any]

_USER = "Quserz"
_CLOCK = "strftime_now"
_DAY = date(2026, 1, 1)

_WRITTEN = """\
{{- BEGIN }}
{%- set start = 1 if messages and messages[0].role == 'system' else 0 %}
{%- set words = messages[0].content if start else DEFAULT %}
{%- set begun = JOINS and (tools or words is not none) %}
{%- if tools %}
    {{- SYSTEM + (words + '\\n\\n' if words else '') + BEFORE }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- AFTER + SYSTEM_CLOSED }}
{%- elif words is not none %}
    {{- SYSTEM + words + SYSTEM_CLOSED + ('' if start else DEFAULT_CLOSED) }}
{%- endif %}
{%- for message in messages[start:] %}
    {%- if message.role == 'tool' %}
        {{- BETWEEN if loop.previtem is defined and loop.previtem.role == 'tool' else TOOL }}
        {{- OPEN + message.content + CLOSE }}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else CLOSED }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- ASSISTANT }}
        {%- if message.reasoning_content or (THINKS and message.reasoning_content is string) %}
            {%- set end = LAST %}
            {{- REASONING + message.reasoning_content + REASONED }}
        {%- else %}
            {%- set end = END if add_generation_prompt or not loop.last else LAST %}
            {{- SHOWN }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- end }}
    {%- else %}
        {%- set system = message.role == 'system' %}
        {{- SYSTEM if system else '' if begun and loop.first else USER }}
        {{- message.content + (SYSTEM_CLOSED if system else CLOSED) }}
    {%- endif %}
{%- endfor %}
{{- PROMPT if add_generation_prompt else '' }}"""


class _Generation(Extension):
    """The `generation` blocks that mark answers for masks: their content is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012 - as the class that it extends has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template, compiled. Raises ConfigError for text that is no template."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        marks: Mapping[str, str] | None = None,
        read: Callable[[str], str] = str,
    ) -> None:
        """`variables`: names available besides the conversation, such as `bos_token`. `marks`: replacements
        of strings in its own text and in `variables`, and nowhere else. `read`: applied to rendered text, as
        the tokenizer reads it."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        names = "|".join(map(re.escape, sorted(marks or (), key=len, reverse=True)))
        put = partial(re.compile(names).sub, lambda found: marks[found[0]]) if marks else str
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._read = read
        self._variables: dict[str, Any] = {name: put(text) for name, text in variables.items()}
        self.needs_clock = False
        """Whether it required a clock: it called for the time without checking that it can."""
        try:
            tree = environment.parse(source)
            for node in tree.find_all((Const, TemplateData)):
                if isinstance(node, TemplateData):
                    node.data = put(node.data)
                elif isinstance(node.value, str):
                    node.value = put(node.value)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"is not a Jinja template: {error.message}, in line {error.lineno}",
                field="chat_template",
                fix="use the model's own tokenizer_config.json or chat_template.jinja",
            ) from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), prompts: bool = True
    ) -> str:
        """The conversation as text. `prompts`: with the opener of the next answer.

        Raises ConfigError if the template refuses it or fails.
        """
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=prompts,
                **self._variables,
            )
            return self._read(text)
        except Exception as error:  # whatever third-party code raises
            lacks_clock = isinstance(error, jinja2.UndefinedError) and _CLOCK in str(error)
            if self.needs_clock or not lacks_clock:
                raise ConfigError(
                    f"fails: {error}",
                    field="chat_template",
                    fix='agent.template = "plain" does without it; the model learns that frame by '
                    "fine-tuning",
                ) from error
        self.needs_clock = True
        self._variables[_CLOCK] = _DAY.strftime
        return self.render(messages, tools, prompts)


@lru_cache(maxsize=8)
def _marked(
    source: str, variables: tuple[tuple[str, str], ...], marks: tuple[tuple[str, str], ...]
) -> ChatTemplate:
    return ChatTemplate(source, dict(variables), dict(marks))


def open_with_tools(
    tokenizer: Tokenizer, template: Template, words: str, schemas: Sequence[ToolSchema]
) -> list[Piece]:
    """The text that the tokenizer's chat template puts before the first user message when tools are offered.

    Only control tokens in the template's own text count: each is rendered as a character that occurs nowhere
    else. So outside text (system message, names and descriptions) never becomes one, whatever the template
    writes around it. Raises ConfigError if the template fails.
    """
    functions = [schema.function_schema() for schema in schemas]
    given = set(words + json.dumps(functions, ensure_ascii=False) + tokenizer.chat_template)
    free = (character for character in map(chr, range(0xF0000, 0x110000)) if character not in given)
    marks = dict(zip(tokenizer.added_tokens, free, strict=False))
    variables = tuple(tokenizer.template_variables.items())
    jinja = _marked(tokenizer.chat_template, variables, tuple(marks.items()))
    messages = [{"role": "system", "content": words}] if words else []
    text = jinja.render([*messages, {"role": "user", "content": _USER}], functions)
    user = "".join(piece if isinstance(piece, str) else marks[piece.name] for piece in template.user)
    before, found, _ = text.partition(user + _USER)
    if not found:
        raise ConfigError("does not render the user message after the tools", field="chat_template")
    names = {mark: name for name, mark in marks.items()}
    parts = re.split(f"([{''.join(names)}])", before)
    return join_text(Control(names[part]) if part in names else part for part in parts)


def write_chat_template(template: Template) -> str:
    """A Jinja template that renders conversations in this template, with tools and calls in Hermes' form."""
    closed = spell((*template.closing, *template.after_end))
    ends = (template.shown_end or template.end, template.end) if not template.openers_end else ("", "")
    strings = {
        "BEGIN": spell(template.begin),
        "SYSTEM": spell(template.system),
        "USER": spell(template.user),
        "ASSISTANT": spell(template.assistant),
        "TOOL": spell(template.tool),
        "BETWEEN": spell(template.result_between),
        "OPEN": spell(template.result_open),
        "CLOSE": spell(template.result_close),
        "PROMPT": spell(template.prompt),
        "REASONING": spell(template.reasoning_open),
        "REASONED": spell(template.reasoning_close),
        "SHOWN": spell(template.shown),
        "END": spell((ends[0], *template.after_end)),
        "LAST": spell((ends[1], *template.after_end)),
        "CLOSED": closed,
        "SYSTEM_CLOSED": spell(template.system_close) + closed * (not template.joins_system),
        "DEFAULT_CLOSED": spell(template.default_close),
        "BEFORE": BEFORE_TOOLS,
        "AFTER": AFTER_TOOLS,
    }
    default = "none" if template.default_system is None else _literal(template.default_system)
    lines = [f"{{%- set {name} = {_literal(text)} %}}" for name, text in strings.items()]
    lines.append(f"{{%- set DEFAULT = {default} %}}")
    lines.append(f"{{%- set THINKS = {str(bool(template.thinking)).lower()} %}}")
    lines.append(f"{{%- set JOINS = {str(template.joins_system).lower()} %}}")
    return "\n".join([*lines, _WRITTEN]) + "\n"


def _literal(text: str) -> str:
    """The text as a Jinja string literal, whose escapes are Python's."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
