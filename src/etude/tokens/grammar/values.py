"""Reads arguments back: from the text of `ToolCall.arguments` to the values that their parameters name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast

from etude.errors import ToolArgumentError
from etude.tokens.grammar.interface import Parameter, is_of_type
from etude.tokens.grammar.json_reader import load_json, printable

_INTEGER = re.compile(r"-?[0-9]{1,18}\Z", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,100})?(?:[eE][-+]?[0-9]{1,4})?\Z", re.ASCII)
_SHOWN = 60
_FAULTS = {
    "integer": "is not an integer",
    "number": "is not a number",
    "boolean": "is neither true nor false",
}
_FIXES = {
    "integer": "write digits, without quotes",
    "number": "write a number such as 0.5",
    "boolean": "write true or false",
    "array": "write a JSON array",
    "object": "write a JSON object",
}


def read_value(parameter: Parameter, text: str) -> object:
    """The argument's value: str, int, float, bool, list or dict, by the parameter's kind.

    Blanks around anything but a string are ignored. Arrays and objects are strict JSON and are checked
    against the schema's `type`, `enum`, `items`, `properties`, `required` and `additionalProperties`.

    Raises ToolArgumentError, for the agent to read, for anything else.
    """
    value = text if parameter.kind == "string" else _read(parameter, text.strip())
    if parameter.enum and value not in parameter.enum:
        allowed = ", ".join(v if isinstance(v, str) else json.dumps(v) for v in parameter.enum)
        raise _wrong(parameter, f"{parameter.name} is none of its values", text, f"use one of: {allowed}")
    if parameter.schema:
        found = _find_fault(value, {"type": parameter.kind, **parameter.schema}, "")
        if found:
            where, what = found
            raise _wrong(parameter, f"{parameter.name}{where} {what}", text, "write what the schema asks for")
    return value


def _wrong(parameter: Parameter, message: str, text: str, fix: str | None = None) -> ToolArgumentError:
    shown = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return ToolArgumentError(message, field=parameter.name, received=shown, fix=fix or _FIXES[parameter.kind])


def _read(parameter: Parameter, text: str) -> object:
    """The value of an argument that is no string."""
    match parameter.kind:
        case "integer" if _INTEGER.match(text):
            return int(text)
        case "number" if _NUMBER.match(text) and math.isfinite(float(text)):
            return float(text)
        case "boolean" if text in ("true", "false"):
            return text == "true"
        case "array" | "object":
            return _read_json(parameter, text)
        case kind:
            raise _wrong(parameter, f"{parameter.name} {_FAULTS[kind]}", text)


def _read_json(parameter: Parameter, text: str) -> object:
    value, error = load_json(text)
    if error:
        raise _wrong(parameter, f"{parameter.name} is not JSON: {error}", text)
    if not is_of_type(value, parameter.kind):
        raise _wrong(parameter, f"{parameter.name} is not an {parameter.kind}", text)
    return value


def _find_fault(value: object, schema: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    """The first place that breaks the schema, and how. Recursion is bounded by the depth of strict JSON.

    A schema may be another program's: a keyword in a form that JSON Schema does not have says nothing.
    """
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else _names(kinds)
    if listed and not any(is_of_type(value, kind) for kind in listed):
        return where, f"is not of type {' or '.join(listed)}"
    allowed = schema.get("enum")
    if isinstance(allowed, list | tuple) and not any(type(value) is type(v) and value == v for v in allowed):
        return where, "is none of its values"
    if isinstance(value, list):
        return _find_item_fault(cast(list[object], value), schema, where)
    if isinstance(value, dict):
        return _find_property_fault(cast(dict[str, object], value), schema, where)
    return None


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | tuple) else []


def _find_item_fault(items: list[object], schema: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    item_schema = schema.get("items")
    if not isinstance(item_schema, Mapping):
        return None
    for position, item in enumerate(items):
        if found := _find_fault(item, item_schema, f"{where}[{position}]"):
            return found
    return None


def _find_property_fault(
    value: dict[str, object], schema: Mapping[str, Any], where: str
) -> tuple[str, str] | None:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    for name in _names(schema.get("required")):
        if name not in value:
            return where, f"lacks {name}"
    further = schema.get("additionalProperties", True)
    for name, entry in value.items():
        entry_schema = properties.get(name, further)
        if entry_schema is False:
            return where, f"has an unknown key {printable(name)}"
        if isinstance(entry_schema, Mapping) and (
            found := _find_fault(entry, entry_schema, f"{where}.{printable(name)}")
        ):
            return found
    return None
