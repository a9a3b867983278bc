"""Parses JSON bodies with limits on the number and nesting of values.

Python's JSON parser holds the GIL, so a body of many small values stalls the whole process in whatever thread
it is parsed. The number of values is therefore counted before parsing, which is cheap.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from etude.errors import UserError

MOST_VALUES = 1 << 20
"""Most values in one body, nested ones included."""
MOST_LEVELS = 200
"""Most levels of nesting."""
_UNIT = re.compile(rb'([^"]*+)(?:"(?:[^"\\]++|\\.)*+"?)?', re.DOTALL)
"""Text outside of strings, and the string that follows it."""


def parse_json(data: bytes | bytearray | memoryview) -> Any:
    """Parses a body. Raises UserError for invalid JSON (infinite numbers are invalid), and for more than
    `MOST_VALUES` values or `MOST_LEVELS` levels."""
    data = bytes(data)
    check_values(data)
    try:
        value = json.loads(data, parse_float=_finite, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise UserError(
            "the body is not JSON", field="body", received=str(error)[:200], fix="send JSON"
        ) from None
    if is_too_deep(value):
        raise _too_deep()
    return value


def check_values(data: bytes) -> None:
    """Raises UserError for JSON with more than `MOST_VALUES` values. Contents of strings do not count."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") <= MOST_VALUES:
        return
    num_values = 0
    for unit in _UNIT.finditer(data):
        outside = unit[1]
        num_values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if num_values > MOST_VALUES:
            raise UserError("the body holds too many values", field="body", fix=f"send {MOST_VALUES} at most")


def is_too_deep(value: object) -> bool:
    """Whether a JSON value is nested so deeply that comparing or encoding it could overflow the stack."""
    level: list[object] = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for entry in level
            if isinstance(entry, dict | list)
            for inner in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return False
    return True


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _too_deep() -> UserError:
    return UserError("is nested too deeply", field="body", fix=f"nest at most {MOST_LEVELS} levels")
