"""Decodes and parses Python source files; parsing is limited to one thread at a time."""

from __future__ import annotations

import ast
import threading

_PARSING = threading.Lock()


def parse_python(text: str, path: str = "<unknown>") -> ast.Module:
    """`ast.parse`, which in Python 3.11 may end in SystemError where two threads parse at once.

    Raises SyntaxError, ValueError, RecursionError and MemoryError as it does.
    Source: github.com/python/cpython/issues/106905.
    """
    with _PARSING:
        return ast.parse(text, path)


def parse_expression(text: str) -> ast.expr:
    """The syntax tree of one expression. Raises as `parse_python`."""
    with _PARSING:
        return ast.parse(text, mode="eval").body


def read_text(data: bytes | Exception | None) -> str | None:
    """Decodes a file's contents; None if the file could not be read (None or an error) or is not UTF-8."""
    try:
        return data.decode() if isinstance(data, bytes) else None
    except UnicodeDecodeError:
        return None
