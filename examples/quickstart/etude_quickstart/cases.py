"""Test cases: calls and their expected results, chosen to distinguish a bug from the correct function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from etude_quickstart.functions import FunctionSpec

NUM_VISIBLE = 3
"""Assertions per function in the visible test file."""
NUM_HIDDEN = 24
"""Assertions per function in the hidden test file, at most."""
_DRAWS = 14
_DRAWS_FOR_BUG = 40
_LONGEST = 32
"""Most characters of a result in a visible test, since a failing test prints it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call: arguments and the right result, as literals."""

    arguments: str
    result: str


@dataclass(frozen=True, slots=True)
class Cases:
    """The cases of one function."""

    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class _Try:
    case: Case
    differs: bool


def choose_cases(
    spec: FunctionSpec,
    right: Callable[..., Any],
    wrong: Callable[..., Any] | None,
    rng: Random,
    min_results: int,
) -> Cases | None:
    """Cases for `spec` that all pass with `right`, with at least `min_results` different results.

    With `wrong` given, at least one visible and two hidden cases fail with it. None if no such cases are
    drawn, or if `wrong` raises an error that reveals too much (any but an index out of range).
    """
    tries = _run(spec, right, wrong, rng)
    if tries is None or len({entry.case.result for entry in tries}) < min_results:
        return None
    short = [entry for entry in tries if len(entry.case.result) <= _LONGEST]
    failing = [entry for entry in short if entry.differs]
    if wrong is not None and (not failing or sum(entry.differs for entry in tries) < 3):
        return None
    visible = (
        failing[:1] + [entry for entry in short if entry not in failing[:1]][: NUM_VISIBLE - len(failing[:1])]
    )
    rng.shuffle(visible)
    rest = [entry for entry in tries if entry not in visible]
    hidden = sorted(rest, key=lambda entry: not entry.differs)[:2] if wrong is not None else []
    hidden += [entry for entry in rest if entry not in hidden][: NUM_HIDDEN - len(hidden)]
    return Cases(tuple(entry.case for entry in visible), tuple(entry.case for entry in hidden))


def _run(
    spec: FunctionSpec, right: Callable[..., Any], wrong: Callable[..., Any] | None, rng: Random
) -> list[_Try] | None:
    """Draws different calls, those with new results first; None if `wrong` raises a revealing error."""
    fresh: list[_Try] = []
    repeated: list[_Try] = []
    seen: set[str] = set()
    results: set[str] = set()
    for _ in range(_DRAWS if wrong is None else _DRAWS_FOR_BUG):
        arguments = spec.draw_inputs(rng)
        text = ", ".join(map(repr, arguments))
        if text in seen:
            continue
        seen.add(text)
        try:
            expected = right(*arguments)
        except (IndexError, ZeroDivisionError):
            continue  # the drawn input lies outside the function's domain
        differs = False
        if wrong is not None:
            try:
                differs = wrong(*arguments) != expected
            except IndexError:
                differs = True
            except (TypeError, ZeroDivisionError, KeyError, ValueError, AttributeError):
                return None
        result = repr(expected)
        (repeated if result in results else fresh).append(_Try(Case(text, result), differs))
        results.add(result)
    return fresh + repeated


def test_file(functions: Sequence[tuple[FunctionSpec, Sequence[Case]]]) -> str:
    """A test file with one test for each function and one assertion for each case."""
    imports = "".join(f"from {spec.module} import {spec.name}\n" for spec, _ in functions)
    tests = "".join(
        f"\n\ndef test_{spec.name}():\n"
        + "".join(f"    assert {spec.name}({case.arguments}) == {case.result}\n" for case in cases)
        for spec, cases in functions
    )
    return imports + tests
