"""The tools of a harness, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from blake3 import blake3

from etude.agent.tools.interface import (
    SURROGATE,
    Access,
    Arguments,
    RunTogether,
    Tool,
    ToolContext,
    how_together,
)
from etude.errors import ConfigError, ToolArgumentError
from etude.records import ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

_KINDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
}
_JSON_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (str, "a string"),
    (bool, "a boolean"),  # before the integers, among which Python counts it
    (int, "an integer"),
    (float, "a number"),
    (type(None), "null"),
    ((list, tuple), "an array"),
    (dict, "an object"),
)


class Registry(Mapping[str, Tool]):
    """A fixed set of tools. Raises ConfigError if two have one name."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.schema.name in self._tools:
                raise ConfigError("two tools have the same name", field="tools", received=tool.schema.name)
            self._tools[tool.schema.name] = tool

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Schemas in the order of registration."""
        return tuple(tool.schema for tool in self._tools.values())

    @property
    def digest(self) -> str:
        """BLAKE3 hex digest of all schemas."""
        return schemas_digest(self.schemas)


def schemas_digest(schemas: Sequence[ToolSchema]) -> str:
    """BLAKE3 hex digest of tool schemas, in this order."""
    return blake3(repr(tuple(schemas)).encode()).hexdigest()


class RestrictedTool:
    """A tool offered with some of its parameters only; the others keep their defaults.
    Implements `Tool`."""

    def __init__(self, tool: Tool, schema: ToolSchema) -> None:
        self._tool = tool
        self.schema = schema
        self.repeatable = tool.repeatable

    def access(self, arguments: Arguments) -> Access:
        return self._tool.access(arguments)

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        return await self._tool.run(arguments, context)

    def together(self, context: ToolContext) -> RunTogether | None:
        return how_together(self._tool, context)


def restricted(tool: Tool, parameters: tuple[str, ...]) -> RestrictedTool:
    """The tool with the named parameters only, which are then all that it accepts.

    So a model keeps the tools that it was trained with when they gain parameters.

    Raises ConfigError for a name that the tool does not have, and if a parameter that it needs is missing.
    """
    known = {parameter.name: parameter for parameter in tool.schema.parameters}
    for name in parameters:
        if name not in known:
            raise ConfigError(f"{tool.schema.name} has no such parameter", field="parameters", received=name)
    for name, parameter in known.items():
        if parameter.required and name not in parameters:
            raise ConfigError(f"{tool.schema.name} needs {name}", field="parameters", received=parameters)
    kept = tuple(known[name] for name in parameters)
    return RestrictedTool(tool, ToolSchema(tool.schema.name, tool.schema.description, kept))


def check_arguments(schema: ToolSchema, arguments: Arguments) -> None:
    """Raises ToolArgumentError if an argument is missing, unknown or not text.

    For sampled calls the grammar ensures it; calls by other ways (MCP, a server) are checked only here. The
    content of the text is validated by the tool.
    """
    accepted = {parameter.name: parameter for parameter in schema.parameters}
    for name, value in arguments.items():
        if name not in accepted:
            raise ToolArgumentError(f"unknown parameter {str(name)[:40]}", field=str(name)[:40])
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            expected, kind = _expected(accepted[name]), json_type(value)
            raise ToolArgumentError(
                f"{name}: expected {expected}, received {kind}", field=name, received=kind
            )
        if not value.isascii() and SURROGATE.search(value):
            raise ToolArgumentError(f"{name} holds characters that are no text", field=name)
    for name, parameter in accepted.items():
        if parameter.required and name not in arguments:
            raise ToolArgumentError(f"missing {name}", field=name)


def json_type(value: object) -> str:
    """The JSON type of a value, with its article: `a string`, `an integer`, `null`."""
    for kinds, words in _JSON_TYPES:
        if isinstance(value, kinds):
            return words
    return "a value that JSON does not have"


def _expected(parameter: Parameter) -> str:
    words = _KINDS[parameter.kind]
    return words if parameter.kind == "string" else f"{words}, written as a string"
