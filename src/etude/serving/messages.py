"""Message formats between our servers and clients: fields of requests, streams of frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.errors import UserError
from etude.serving.errors import plain

Header = dict[str, Any]
Encoded = tuple[Any, bytes]
"""A JSON value, and the payload bytes that accompany it."""

FRAMES = "application/vnd.etude.frames"
"""Media type of a stream of frames."""
BEAT_S = 5.0
"""Interval of a server's heartbeats during a long call. Three missed ones mean that it is lost."""

MOST_NUMBER = 1e300
"""Largest integer accepted for a float field: JSON integers may be too large for a Python float."""

Fields = Mapping[str, tuple[type, ...]]
"""Name -> the types that its value may have; with `type(None)` among them the field is optional."""


def check_fields(raw: object, fields: Fields) -> Header:
    """Validates a request's fields and returns them as keyword arguments. Raises UserError for a field."""
    if not isinstance(raw, dict):
        raise UserError("must be a JSON object", field="body", received=plain(raw), fix="send an object")
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise UserError("unknown field", field=unknown[0], fix="use one of " + ", ".join(fields))
    for name, kinds in fields.items():
        value = raw.get(name)
        wanted = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise UserError(f"must be {names}", field=name, received=plain(value), fix="correct the request")
        if isinstance(value, int) and float in kinds and int not in kinds and abs(value) > MOST_NUMBER:
            raise UserError("is out of range", field=name, fix=f"send {MOST_NUMBER:.0e} at most")
    return {name: raw[name] for name in fields if name in raw}


def check_strings(value: object, field: str) -> list[str]:
    """Returns `value` if it is a list of strings. Raises UserError."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(
            "must be a list of strings", field=field, received=plain(value), fix="correct the value"
        )
    return value
