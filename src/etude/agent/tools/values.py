"""Parses arguments that are more than text: booleans, lists, JSON. On the wire all of them are text."""

from __future__ import annotations

import json
import re
from typing import Any

from etude.agent.tools.interface import Arguments
from etude.errors import ToolArgumentError

_WORDS = re.compile(r"(?:\[[^\]\n]*\]|[^\s\[])+|\[")
"""Words separated by blanks; blanks within brackets belong to the word: `test_x[a b]`."""
_TRUE, _FALSE = frozenset({"true", "yes", "1"}), frozenset({"false", "no", "0", ""})
_JSON_CHARACTERS = 1 << 20
TEXTS = {"items": {"type": "string"}}
"""JSON Schema of a list of texts."""


def flag(arguments: Arguments, name: str) -> bool:
    """The argument as a boolean; False if it is missing. Raises ToolArgumentError for anything else."""
    text = arguments.get(name, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ToolArgumentError(f"{name} must be true or false", field=name, received=text[:20])


def json_value(arguments: Arguments, name: str) -> Any:
    """The argument as JSON. Raises ToolArgumentError if it is invalid, too long or too deeply nested."""
    text = arguments[name]
    if len(text) > _JSON_CHARACTERS:
        raise ToolArgumentError(f"{name} is too long", field=name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolArgumentError(f"{name} is no JSON: {str(error)[:80]}", field=name) from error


def lines_of(arguments: Arguments, name: str, limit: int) -> list[str]:
    """The argument as a list of texts: a JSON list, or one entry a line. Raises ToolArgumentError."""
    entries = _listed(arguments, name)
    return _bounded(name, arguments.get(name, "").split("\n") if entries is None else entries, limit)


def words_of(arguments: Arguments, name: str, limit: int) -> list[str]:
    """The argument as a list of words: a JSON list, or separated by blanks. Raises ToolArgumentError."""
    entries = _listed(arguments, name)
    return _bounded(name, _WORDS.findall(arguments.get(name, "")) if entries is None else entries, limit)


def _listed(arguments: Arguments, name: str) -> list[str] | None:
    """The entries of a JSON list; None if the argument is no such list, even if it is in brackets."""
    text = arguments.get(name, "").strip()
    if not text.startswith("["):
        return None
    try:
        entries = json_value(arguments, name)
    except ToolArgumentError:
        if text.startswith('["'):
            raise
        return None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ToolArgumentError(f"{name} must be a list of texts", field=name)
    return entries


def _bounded(name: str, entries: list[str], limit: int) -> list[str]:
    kept = [entry.strip() for entry in entries if entry.strip()]
    if len(kept) > limit:
        raise ToolArgumentError(f"{name} has more than {limit} entries", field=name, received=len(kept))
    return kept
