"""Tools that a client defines: from their JSON Schema to our grammars, and arguments back to JSON.

The schema goes to the model unchanged. A parameter has one kind: of a union with null the other type, of any
other union the first known type, and text if it has no type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from etude.errors import ToolArgumentError
from etude.records import ToolCall
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.fields import objects, wrong
from etude.tokens.grammar.interface import KINDS, Kind, Parameter, ToolSchema
from etude.tokens.grammar.values import read_value

MAX_TOOLS = 1024
MAX_PARAMETERS = 1024
"""Per tool."""


@dataclass(frozen=True)
class ClientTool(ToolSchema):
    """A tool as the client describes it: `raw` is its entry in OpenAI's form."""

    raw: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def function_schema(self) -> dict[str, object]:
        """The client's own entry."""
        return dict(self.raw)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The defaults that its schema gives for omitted parameters."""
        properties = self.raw["function"]["parameters"].get("properties") or {}
        entries = {name: entry for name, entry in properties.items() if isinstance(entry, dict)}
        return {name: entry["default"] for name, entry in entries.items() if "default" in entry}


def read_entries(
    value: object, read_tool: Callable[[Mapping[str, Any], str], ClientTool]
) -> tuple[ClientTool, ...]:
    """The tools of a request; `read_tool` is called with an entry and its field. Raises BadRequestError."""
    entries = objects(value or [], "tools")
    if len(entries) > MAX_TOOLS:
        raise wrong("tools", len(entries), f"at most {MAX_TOOLS} tools")
    return tuple(read_tool(entry, f"tools[{place}]") for place, entry in enumerate(entries))


def client_tool(name: object, description: object, schema: object, field_name: str) -> ClientTool:
    """A tool from its name, description and JSON Schema. Raises BadRequestError."""
    if not isinstance(name, str) or not name:
        raise BadRequestError("a tool needs a name", field=field_name, received=name, fix="send a name")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    properties = schema.get("properties") or {} if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(properties, dict):
        raise BadRequestError(
            "must be a JSON Schema object",
            field=f"{field_name}.parameters",
            received=type(schema).__name__,
            fix='give {"type": "object", "properties": {...}}',
        )
    words = description if isinstance(description, str) else ""
    required = schema.get("required")
    needed: Sequence[object] = required if isinstance(required, list) else ()
    if len(properties) > MAX_PARAMETERS:
        raise wrong(f"{field_name}.parameters", len(properties), f"at most {MAX_PARAMETERS} properties")
    parameters = tuple(_parameter(str(key), entry, key in needed) for key, entry in properties.items())
    raw = {"type": "function", "function": {"name": name, "description": words, "parameters": schema}}
    return ClientTool(name, words, parameters, raw)


def _parameter(name: str, schema: object, required: bool) -> Parameter:
    entry = schema if isinstance(schema, dict) else {}
    words = entry.get("description")
    return Parameter(name, words if isinstance(words, str) else "", required, _kind(entry))


def _kind(schema: Mapping[str, Any]) -> Kind:
    branches = [schema] if schema.get("type") is not None else schema.get("anyOf") or schema.get("oneOf")
    for branch in branches if isinstance(branches, list) else []:
        declared = branch.get("type") if isinstance(branch, dict) else None
        for found in declared if isinstance(declared, list) else [declared]:
            if isinstance(found, str) and found in KINDS:
                return cast(Kind, found)
    return "string"


def call_arguments(call: ToolCall, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """A well-formed call's arguments as JSON values; an argument that is not of its kind stays text."""
    schema = next((tool for tool in tools if tool.name == call.name), None)
    parameters = {parameter.name: parameter for parameter in schema.parameters} if schema else {}
    return {name: _value(parameters.get(name), text) for name, text in call.arguments.items()}


def _value(parameter: Parameter | None, text: str) -> Any:
    if parameter is None or parameter.kind == "string":
        return text
    try:
        return read_value(parameter, text)
    except ToolArgumentError:  # the agent's mistake: the client's own tool reports it
        return text
