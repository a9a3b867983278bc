"""Tool schemas: name, description and parameters of a tool, as grammars and models see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from etude.errors import ConfigError

Kind = Literal["string", "integer", "number", "boolean", "array", "object"]
"""The types of JSON Schema that an argument may have."""

MAX_NAME_CHARACTERS = 64
"""Longest name of a tool or parameter."""

KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool.

    In `ToolCall.arguments` every argument is text, whatever the grammar; `kind` says what the text holds and
    how `read_value` reads it back:

        string   the value itself                      integer  decimal digits, perhaps with a minus
        number   a JSON number                         boolean  `true` or `false`
        array    a JSON array, as it was written       object   a JSON object, as it was written
    """

    name: str
    description: str
    required: bool = True
    kind: Kind = "string"
    enum: tuple[str | int | float | bool, ...] = ()
    """The only values allowed; empty allows all. Not for arrays and objects."""
    schema: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """More keywords of JSON Schema: `items` of an array; `properties`, `required` of an object. All of them
    are exported, and checked by `read_value`."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"no such kind of argument: {self.kind}"

    def __repr__(self) -> str:
        """Includes later fields only if they are set, so that digests of older tools stay the same."""
        shown = {name: getattr(self, name) for name in ("name", "description", "required", "kind")}
        later = {"enum": self.enum, "schema": dict(self.schema)}
        shown |= {name: value for name, value in later.items() if value}
        return f"Parameter({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def json_schema(self) -> dict[str, object]:
        """The argument's own JSON Schema."""
        described: dict[str, object] = {"type": self.kind, "description": self.description}
        if self.enum:
            described["enum"] = list(self.enum)
        return {**described, **self.schema}


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool's name, description, and parameters in the order in which they are usually written."""

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()

    def json_schema(self) -> dict[str, object]:
        """The parameters as a JSON Schema object: MCP's `inputSchema`, OpenAI's `parameters`."""
        return {
            "type": "object",
            "properties": {parameter.name: parameter.json_schema() for parameter in self.parameters},
            "required": [parameter.name for parameter in self.parameters if parameter.required],
            "additionalProperties": False,
        }

    def function_schema(self) -> dict[str, object]:
        """The tool as an entry of `tools` in OpenAI's chat completions and in chat templates."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.json_schema(),
            },
        }


ToolTable = Mapping[str, Mapping[str, Parameter]]
"""Parameters by tool name and parameter name."""


def check_names(tools: Sequence[ToolSchema], marks: Sequence[str]) -> None:
    """Raises ConfigError for names that are empty, too long, unprintable, given twice, hold a mark, or begin
    or end with blanks, which parsers strip."""
    names = [tool.name for tool in tools]
    wrong = [name for name in names if names.count(name) > 1]
    for tool in tools:
        parameters = [parameter.name for parameter in tool.parameters]
        wrong += [name for name in parameters if parameters.count(name) > 1]
        wrong += [name for name in [tool.name, *parameters] if not _can_be_named(name, marks)]
    if wrong:
        raise ConfigError(
            f"names must be distinct, printable, without blanks at an end, and at most {MAX_NAME_CHARACTERS} "
            "characters",
            field="tools",
            received=sorted(set(wrong)),
            fix="rename the tool or the parameter",
        )


def _can_be_named(name: str, marks: Sequence[str]) -> bool:
    is_clean = name.isprintable() and name == name.strip()
    return is_clean and 0 < len(name) <= MAX_NAME_CHARACTERS and not any(mark in name for mark in marks)
