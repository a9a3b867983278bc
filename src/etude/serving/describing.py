"""OpenAPI descriptions of routes that parse their requests by hand."""

from __future__ import annotations

from typing import Any

from etude.serving.messages import Fields

JSON = "application/json"
BYTES = "application/octet-stream"
BINARY = {"type": "string", "format": "binary"}
"""The schema of a body of raw bytes."""
_NONE = type(None)
_NAMES = {
    str: "string", dict: "object", list: "array", int: "integer", float: "number", bool: "boolean",
    _NONE: "null",
}  # fmt: skip


def described(fields: Fields | None = None, *, body: str | None = None) -> dict[str, Any]:
    """The OpenAPI description of a route's request. `fields`: those of a JSON object; `body`: the media type
    of any other body."""
    found: dict[str, Any] = {}
    if fields is not None:
        found["requestBody"] = {"content": {JSON: {"schema": object_schema(fields)}}}
    elif body is not None:
        schema = {"type": "object"} if body == JSON else BINARY
        media = (body,) if body == JSON else dict.fromkeys((body, BYTES))
        found["requestBody"] = {"content": {kind: {"schema": schema} for kind in media}}
    return found


def answering(*media: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with these media types."""
    contents: dict[str, Any] = {kind: {} for kind in media}
    return {status: {"description": "Successful Response", "content": contents}}


def object_schema(fields: Fields, **known: Any) -> dict[str, Any]:
    """The JSON Schema of an object with these fields. `known`: schemas that replace those of some fields."""
    properties = {name: {"type": [_NAMES[kind] for kind in kinds]} for name, kinds in fields.items()}
    return {
        "type": "object",
        "properties": {**properties, **known},
        "required": [name for name, kinds in fields.items() if _NONE not in kinds],
        "additionalProperties": False,
    }
