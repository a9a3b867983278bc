"""Translates names and types of MCP tools to ours: identifiers in lower_snake_case, arguments as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from etude.errors import ConfigError
from etude.tokens.grammar import Parameter
from etude.tokens.grammar.interface import Kind

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OTHER = re.compile(r"[^a-z0-9]+")
_KINDS: tuple[str, ...] = get_args(Kind)
_OWN_KEYS = frozenset({"type", "description", "enum", "title", "default", "anyOf", "oneOf"})
_DESCRIPTION_CHARACTERS = 400


def text_of(value: object) -> str:
    """A JSON value as `ToolCall.arguments` holds it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def own_name(name: str) -> str:
    """`list-issues`, `listIssues` -> `list_issues`. Raises ConfigError if nothing is left of the name."""
    own = _OTHER.sub("_", _HUMP.sub("_", name).lower()).strip("_")
    if not own:
        raise ConfigError(
            "has neither letters nor digits", field="agent.mcp: name", received=name, fix="leave the tool out"
        )
    return own if own[0].isalpha() else f"x_{own}"


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Parameter]:
    """The parameters of a tool's input schema, by the server's names of the properties.

    Types that we do not have become text: `null` in a union is dropped, any other union is text.
    Raises ConfigError if two properties get one name.
    """
    properties = schema.get("properties")
    required = schema.get("required")
    required = frozenset(required) if isinstance(required, list) else frozenset[str]()
    found: dict[str, Parameter] = {}
    for name, described in (properties if isinstance(properties, Mapping) else {}).items():
        described = described if isinstance(described, Mapping) else {}
        parameter = _parameter(own_name(name), described, name in required)
        if parameter.name in {known.name for known in found.values()}:
            raise ConfigError(
                "two parameters get the same name",
                field="agent.mcp: parameter",
                received=name,
                fix="leave the tool out",
            )
        found[name] = parameter
    return found


def _parameter(name: str, described: Mapping[str, Any], required: bool) -> Parameter:
    described = _without_null(described)
    kind = described.get("type")
    description = " ".join(str(described.get("description") or "").split())[:_DESCRIPTION_CHARACTERS]
    if kind not in _KINDS:
        return Parameter(name, description, required)
    enum = described.get("enum")
    values = tuple(enum) if isinstance(enum, list) and kind == "string" else ()
    if not all(isinstance(value, str) for value in values):
        values = ()
    more = {key: value for key, value in described.items() if key not in _OWN_KEYS}
    return Parameter(
        name, description, required, cast(Kind, kind), values, more if kind in ("array", "object") else {}
    )


def _without_null(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without the choice of `null`, where that leaves one type."""
    kind = described.get("type")
    if isinstance(kind, list):
        types = [entry for entry in kind if entry != "null"]
        return {**described, "type": types[0] if len(types) == 1 else None}
    for key in ("anyOf", "oneOf"):
        choices = described.get(key)
        if isinstance(choices, list):
            types = [
                choice for choice in choices if isinstance(choice, Mapping) and choice.get("type") != "null"
            ]
            if len(types) == 1:
                return {**described, **types[0]}
    return described
