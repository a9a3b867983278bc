"""Reads and validates the fields of a request body; errors name the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from etude.serving.json_bodies import parse_json
from etude.tokens.chat.errors import BadRequestError

_MAX_STOPS = 16
_MAX_SEED = (1 << 63) - 1
_MAX_STOP_CHARACTERS = 1024


def parse_body(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises UserError."""
    body = parse_json(data)
    if not isinstance(body, dict):
        raise wrong("body", body, "a JSON object")
    return body


def wrong(field: str, received: object, wanted: str) -> BadRequestError:
    """The error for a field of a wrong type or value."""
    return unsupported(field, received, f"must be {wanted}", f"send {wanted}")


def unsupported(field: str, received: object, why: str, fix: str = "leave it out") -> BadRequestError:
    """The error for a feature that this endpoint does not support."""
    shown = received if isinstance(received, str | int | float | bool | None) else type(received).__name__
    return BadRequestError(why, field=field, received=shown, fix=fix)


def number(body: Mapping[str, Any], field: str, default: float, low: float, high: float) -> float:
    """A number within bounds."""
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise wrong(field, value, f"a number from {low:g} to {high:g}")
    return float(value)


def integer(body: Mapping[str, Any], field: str, low: int, high: int = _MAX_SEED) -> int | None:
    """A whole number within bounds, or None where it is missing."""
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(field, value, f"a whole number from {low} to {high}")
    return value


def flag(body: Mapping[str, Any], field: str, default: bool) -> bool:
    """True or false."""
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(field, value, "true or false")
    return value


def text(value: object, field: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(field, value, "a string")
    return value


def objects(value: object, field: str) -> list[dict[str, Any]]:
    """A list of objects."""
    if not isinstance(value, list):
        raise wrong(field, value, "a list")
    for place, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise wrong(f"{field}[{place}]", entry, "an object")
    return value


def read_text(
    content: object, field: str, joint: str, kinds: Collection[str] = ("text",), unseen: Collection[str] = ()
) -> str:
    """The text of content that is a string or a list of parts of these kinds. `joint`: put between parts.
    `unseen`: kinds that are replaced by a note, such as an image that a tool returns."""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for place, part in enumerate(objects(content, field)):
        kind = part.get("type")
        if kind in unseen:
            parts.append(f"[{kind}: not shown, only text can be sent to this model]")
            continue
        if kind not in kinds:
            raise unsupported(f"{field}[{place}].type", kind, "only text can be sent to this model")
        name = "refusal" if kind == "refusal" else "text"
        parts.append(text(part.get(name), f"{field}[{place}].{name}"))
    return joint.join(parts)


def stop_strings(value: object, field: str) -> tuple[str, ...]:
    """Stop strings, one or a list; empty ones are refused."""
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise wrong(field, value, "a string or a list of strings")
    if len(listed) > _MAX_STOPS or not all(isinstance(stop, str) and stop for stop in listed):
        raise wrong(field, len(listed), f"at most {_MAX_STOPS} strings, none of them empty")
    if any(len(stop) > _MAX_STOP_CHARACTERS for stop in listed):
        raise wrong(field, max(map(len, listed)), f"strings of at most {_MAX_STOP_CHARACTERS} characters")
    return tuple(listed)
