"""Parses arguments: from the text of `ToolCall.arguments` to values of their parameters' kinds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from etude.errors import ToolArgumentError
from etude.tokens.grammar.interface import Parameter
from etude.tokens.grammar.json_reader import check_json

_INTEGER = re.compile(r"-?[0-9]{1,18}\Z", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,100})?(?:[eE][-+]?[0-9]{1,4})?\Z", re.ASCII)
_SHOWN = 60
_FAULT_CHARACTERS = 200
_WANTED = {
    "integer": ("is not an integer", "write digits, without quotes"),
    "number": ("is not a number", "write a number such as 0.5"),
    "boolean": ("is neither true nor false", "write true or false"),
    "array": ("is not an array", "write a JSON array"),
    "object": ("is not an object", "write a JSON object"),
}
"""By kind: the error for another value, and how to write one."""


def read_value(parameter: Parameter, text: str) -> object:
    """The argument's value: str, int, float, bool, list or dict, by the parameter's kind.

    Blanks around anything but a string are ignored. Arrays and objects are strict JSON and are checked
    against the JSON Schema, of draft 2020-12.

    Raises ToolArgumentError, for the agent to read, for anything else.
    """
    value = text if parameter.kind == "string" else _read(parameter, text.strip())
    if parameter.enum and value not in parameter.enum:
        allowed = ", ".join(v if isinstance(v, str) else json.dumps(v) for v in parameter.enum)
        raise _wrong(parameter, " is none of its values", text, f"use one of: {allowed}")
    if parameter.schema:
        found = _find_fault(value, {"type": parameter.kind, **parameter.schema})
        if found:
            where, what = found
            raise _wrong(parameter, f"{where} {what}", text, "write what the schema asks for")
    return value


def _wrong(parameter: Parameter, fault: str, text: str, fix: str | None = None) -> ToolArgumentError:
    shown = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return ToolArgumentError(
        f"{parameter.name}{fault}",
        field=parameter.name,
        received=shown,
        fix=fix or _WANTED[parameter.kind][1],
    )


def _read(parameter: Parameter, text: str) -> object:
    """Parses an argument that is no string."""
    match parameter.kind:
        case "integer" if _INTEGER.match(text):
            return int(text)
        case "number" if _NUMBER.match(text) and math.isfinite(float(text)):
            return int(text) if _INTEGER.match(text) else float(text)
        case "boolean" if text in ("true", "false"):
            return text == "true"
        case "array" | "object" as kind:
            found, error = check_json(text)
            if error:
                raise _wrong(parameter, f" is not JSON: {error}", text)
            if found == kind:
                return json.loads(text)
        case _:
            pass
    raise _wrong(parameter, f" {_WANTED[parameter.kind][0]}", text)


def _find_fault(value: Any, schema: Mapping[str, object]) -> tuple[str, str] | None:
    """The first place that breaks the schema, and how.

    A schema may be third-party: one that is invalid, or refers to others, is ignored.
    """
    from jsonschema import Draft202012Validator  # comes with MCP's library
    from referencing import Registry

    try:
        checker = Draft202012Validator(schema, registry=Registry())  # an empty one fetches nothing
        fault = next(checker.iter_errors(value), None)
    except Exception:
        return None
    return fault and (fault.json_path[1:], fault.message[:_FAULT_CHARACTERS])
