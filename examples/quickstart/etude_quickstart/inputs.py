"""Random inputs for generated functions, concentrated on edge cases: bounds, equal values, ends."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from etude_quickstart.families import Kind

_LETTERS = "abeouxz"


def draw_arguments(rng: Random, kinds: Sequence[Kind], constants: Sequence[int]) -> tuple[Any, ...]:
    """One argument per kind. `constants`: numbers in the code; values are often equal or next to them."""
    values = [_draw(rng, kind, constants) for kind in kinds]
    _relate_numbers(rng, kinds, values)
    _relate_letters(rng, kinds, values)
    return tuple(values)


def _draw(rng: Random, kind: Kind, constants: Sequence[int]) -> Any:
    match kind:
        case "number":
            return _number(rng, constants)
        case "count":
            return rng.randint(0, 4)
        case "numbers":
            return [_number(rng, constants) for _ in range(rng.randint(3, 5))]
        case "any_numbers":
            return [rng.randint(0, 9) for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        case "rows":
            return [
                [_number(rng, constants) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 2))
            ]
        case "text":
            return _text(rng, rng.randint(2, 5))
        case "letter":
            return rng.choice(_LETTERS)
        case "words":
            return [_text(rng, rng.randint(1, 4)) for _ in range(rng.randint(2, 3))]
        case "table":
            return {letter: _number(rng, constants) for letter in rng.sample(_LETTERS, rng.randint(2, 3))}
        case "flag":
            return rng.random() < 0.5


def _number(rng: Random, constants: Sequence[int]) -> int:
    if constants and rng.random() < 0.3:
        return max(0, rng.choice(constants) + rng.choice((-1, 0, 0, 1)))
    return rng.randint(0, 9)


def _text(rng: Random, length: int) -> str:
    text = "".join(rng.choice(_LETTERS) for _ in range(length))
    return text.upper() if rng.random() < 0.2 else text


def _relate_numbers(rng: Random, kinds: Sequence[Kind], values: list[Any]) -> None:
    """Sometimes makes numbers equal to each other, and list items equal to numbers."""
    numbers = [index for index, kind in enumerate(kinds) if kind == "number"]
    if len(numbers) > 1 and rng.random() < 0.25:
        first, second = rng.sample(numbers, 2)
        values[first] = values[second]
    for index, kind in enumerate(kinds):
        if kind == "numbers" and numbers and rng.random() < 0.6:
            values[index][rng.randrange(len(values[index]))] = values[rng.choice(numbers)]
        elif kind == "rows" and numbers and rng.random() < 0.6:
            row = rng.choice(values[index])
            row[rng.randrange(len(row))] = values[rng.choice(numbers)]
    lists = [index for index, kind in enumerate(kinds) if kind == "numbers"]
    if len(lists) == 2 and rng.random() < 0.7:
        values[lists[1]][rng.randrange(3)] = values[lists[0]][rng.randrange(3)]


def _relate_letters(rng: Random, kinds: Sequence[Kind], values: list[Any]) -> None:
    """Makes a letter parameter occur in the text or among the keys more often than not."""
    if "letter" not in kinds or rng.random() < 0.3:
        return
    letter = kinds.index("letter")
    for index, kind in enumerate(kinds):
        if kind == "text":
            values[letter] = rng.choice((values[index][0], values[index][-1], rng.choice(values[index])))
        elif kind == "table":
            values[letter] = rng.choice(list(values[index]))
