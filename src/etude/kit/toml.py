"""Writes TOML that `tomllib` reads back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def toml_text(tree: Mapping[str, Any]) -> str:
    """A tree of tables and values as TOML text; within each table its values come before its subtables."""
    return "\n".join(_lines(tree, ())).strip() + "\n"


def toml_value(value: str | bool | float | Sequence[Any]) -> str:
    """One value in TOML syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON strings are valid TOML strings, except that TOML also requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"[{', '.join(map(toml_value, value))}]" if isinstance(value, Sequence) else repr(value)


def _lines(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    tables = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    if path and (len(tables) < len(tree) or not tree):
        yield f"\n[{'.'.join(map(_key, path))}]"
    yield from (f"{_key(key)} = {toml_value(tree[key])}" for key in tree if key not in tables)
    for key, table in tables.items():
        yield from _lines(table, (*path, key))


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else toml_value(key)
