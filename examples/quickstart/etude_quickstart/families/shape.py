"""The shapes that families draw: functions before names are assigned."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from etude_quickstart.families.language import Phrase

Result = Literal["number", "numbers", "flag", "text", "words", "table"]
"""Result type of a function: int, list of int, bool, str, list of str, dict with int values."""

Kind = Literal[
    "number", "count", "numbers", "any_numbers", "rows", "text", "letter", "words", "table", "flag"
]
"""Type of a parameter. `any_numbers` is often empty, `count` is small."""

PARAMETERS: dict[str, Kind] = {
    "xs": "numbers",
    "ys": "numbers",
    "es": "any_numbers",
    "rows": "rows",
    "ws": "words",
    "d": "table",
    "s": "text",
    "t": "letter",
    "n": "count",
    "a": "number",
    "b": "number",
    "c": "number",
    "flag": "flag",
}
"""Every parameter name that a family may use, in the order of signatures -> its type."""

_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Shape:
    """A function without a name, with canonical parameter names.

    `signature` holds the parameters as written between the parentheses (defaults included),
    `lines` the body without the outer indentation.
    """

    signature: tuple[str, ...]
    docstring: str
    lines: tuple[str, ...]
    returns: Result

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(entry.partition("=")[0] for entry in self.signature)


@dataclass(frozen=True, slots=True)
class Family:
    """A way of drawing functions of one pattern."""

    name: str
    draw: Callable[[Random], Shape]


Step = tuple[str, Phrase | str]
"""Indentation (as spaces) and a phrase, or a line that the docstring does not mention."""


def compose(returns: Result, *steps: Phrase | Step, defaults: Sequence[tuple[str, str]] = ()) -> Shape:
    """Builds a function from statements: its docstring reads them in order, its signature has what they use.

    A step is a phrase at the outer indentation, or (indentation, phrase or silent line). `defaults`
    are (parameter, constant) pairs, said first.
    """
    said = [f"default {name} to {value}" for name, value in defaults]
    lines: list[str] = []
    for step in steps:
        indentation, phrase = step if isinstance(step, tuple) else ("", step)
        if isinstance(phrase, str):
            lines.append(indentation + phrase)
            continue
        lines.append(indentation + phrase.code)
        if phrase.words:
            said.append(phrase.words)
    used = set(_WORD.findall("\n".join(lines)))
    given = dict(defaults)
    plain = [name for name in PARAMETERS if name in used and name not in given]
    signature = (*plain, *(f"{name}={value}" for name, value in defaults))
    sentence = ", ".join(said)
    return Shape(signature, f"{sentence[0].upper()}{sentence[1:]}.", tuple(lines), returns)
