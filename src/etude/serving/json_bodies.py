"""JSON that a client sends: bounded in what it holds, and read off the event loop where it is large.

Python reads JSON without letting another thread run meanwhile, so a body of many small values holds up the
whole process wherever it is read. Their number is therefore counted beforehand, which takes little.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from etude.errors import UserError

MOST_VALUES = 1 << 20
"""Values in one body, those within values included."""
MOST_LEVELS = 200
"""Values within values."""
_UNIT = re.compile(rb'([^"]*+)(?:"(?:[^"\\]++|\\.)*+"?)?', re.DOTALL)
"""What stands outside of strings, and the string behind it."""


def parse_json(data: bytes | bytearray | memoryview) -> Any:
    """The value of a body. Raises UserError for what is no JSON (infinite numbers are none), or holds more
    than `MOST_VALUES` or `MOST_LEVELS`."""
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
    """Raises UserError for JSON of more than `MOST_VALUES`. Strings may hold what they like."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") <= MOST_VALUES:
        return
    num_values = 0
    for unit in _UNIT.finditer(data):
        outside = unit[1]
        num_values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if num_values > MOST_VALUES:
            raise UserError("the body holds too many values", field="body", fix=f"send {MOST_VALUES} at most")


def is_too_deep(value: object) -> bool:
    """Whether a JSON value is nested so deeply that comparing or writing it would need too much stack."""
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
        raise ValueError(f"{text[:40]} is beyond all numbers")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON's")


def _too_deep() -> UserError:
    return UserError("is nested too deeply", field="body", fix=f"at most {MOST_LEVELS} levels")
