"""The chat templates of published models: Jinja text, rendered as transformers renders it, and written.

A template is somebody else's program: it runs in Jinja's sandbox, and what it gives is looked at
(`tokens.derived`) before any conversation is laid out as it says. It has no clock: a frame that names the day
would be another one tomorrow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from etude.errors import ConfigError
from etude.tokens.grammar.hermes import AFTER_TOOLS, BEFORE_TOOLS
from etude.tokens.pieces import spell
from etude.tokens.template import Template

Message = Mapping[str, Any]

_WRITTEN = """\
{{- BEGIN }}
{%- set start = 1 if messages and messages[0].role == 'system' else 0 %}
{%- set words = messages[0].content if start else DEFAULT %}
{%- if tools %}
    {{- SYSTEM + (words + '\\n\\n' if words else '') + BEFORE }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- AFTER + CLOSED }}
{%- elif words is not none %}
    {{- SYSTEM + words + CLOSED }}
{%- endif %}
{%- for message in messages[start:] %}
    {%- if message.role == 'tool' %}
        {{- BETWEEN if loop.previtem is defined and loop.previtem.role == 'tool' else TOOL }}
        {{- OPEN + message.content + CLOSE }}
        {{- '' if loop.nextitem is defined and loop.nextitem.role == 'tool' else CLOSED }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- ASSISTANT }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + (call.name | tojson) + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- END }}
    {%- else %}
        {{- (SYSTEM if message.role == 'system' else USER) + message.content + CLOSED }}
    {%- endif %}
{%- endfor %}
{{- ASSISTANT if add_generation_prompt else '' }}"""


class _Generation(Extension):
    """The blocks that mark answers for masks: what they hold is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - as the class that it extends has it

    def parse(self, parser: Parser) -> list[Node]:
        """See Extension.parse."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template, compiled. Raises ConfigError for text that is no template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: what it may name besides the conversation, such as `bos_token`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"is not a Jinja template: {error.message}, in line {error.lineno}",
                field="chat_template",
                fix="use the model's own tokenizer_config.json or chat_template.jinja",
            ) from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), prompts: bool = True
    ) -> str:
        """The conversation as text. `prompts`: up to where the next answer begins.

        Raises ConfigError where the template refuses it or fails.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=prompts,
                **self._variables,
            )
        except Exception as error:  # whatever somebody else's program raises
            raise ConfigError(f"fails: {error}", field="chat_template") from error


def write_chat_template(template: Template) -> str:
    """A Jinja template that renders conversations in this frame, with tools and calls as Hermes has them."""
    strings = {
        "BEGIN": spell(template.begin),
        "SYSTEM": spell(template.system),
        "USER": spell(template.user),
        "ASSISTANT": spell(template.assistant),
        "TOOL": spell(template.tool),
        "BETWEEN": spell(template.result_between),
        "OPEN": spell(template.result_open),
        "CLOSE": spell(template.result_close),
        "END": spell((template.end, *template.after_end)),
        "CLOSED": spell((*template.closing, *template.after_end)),
        "BEFORE": BEFORE_TOOLS,
        "AFTER": AFTER_TOOLS,
    }
    default = "none" if template.default_system is None else _literal(template.default_system)
    lines = [f"{{%- set {name} = {_literal(text)} %}}" for name, text in strings.items()]
    lines.append(f"{{%- set DEFAULT = {default} %}}")
    return "\n".join([*lines, _WRITTEN]) + "\n"


def _literal(text: str) -> str:
    """The text as a string of Jinja's, whose escapes are Python's."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
