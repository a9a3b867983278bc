"""Functions that call a helper of another module and do something with what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from etude_quickstart.families.language import (
    Phrase,
    binary,
    comparison,
    constant,
    give,
    largest_or_smallest,
    otherwise,
    start,
    term,
    update,
    when,
)
from etude_quickstart.families.lists import slice_of
from etude_quickstart.families.shape import PARAMETERS, Result, Shape, compose

HELPER = "helper"
"""Placeholder for the helper's name until names are assigned."""


def draw_caller(rng: Random, helper_returns: Result, parameters: Sequence[str]) -> Shape:
    """A function with the same parameters as the helper, which calls it once with all of them."""
    words = " and ".join(parameters)
    call = Phrase(f"r = {HELPER}({', '.join(parameters)})", f"set r to {HELPER} of {words}")
    numbers = [name for name in parameters if PARAMETERS[name] in ("number", "count")]
    if helper_returns == "number":
        return _on_number(rng, call, numbers)
    if helper_returns == "flag":
        first, second = rng.sample(range(1, 10), 2)
        return compose(
            "number",
            call,
            when(rng, Phrase("r", "r")),
            ("    ", Phrase(f"return {first}", f"return {first}")),
            Phrase(f"return {second}", f"else return {second}"),
        )
    if helper_returns == "numbers":
        return _on_numbers(rng, call, numbers)
    if helper_returns == "table":
        amount = binary(rng, "sum(r.values())", numbers)
        return compose("number", call, give(_named(amount, "sum(r.values())", "sum of values of r")))
    if helper_returns == "words":
        return (
            compose("words", call, give(slice_of(rng, "r")))
            if rng.random() < 0.3
            else _on_text(rng, call, '"".join(r)')
        )
    return _on_text(rng, call, "r")


def _named(value: Phrase, code: str, words: str) -> Phrase:
    return Phrase(value.code, value.words.replace(code, words))


def _on_number(rng: Random, call: Phrase, numbers: Sequence[str]) -> Shape:
    form = rng.randrange(3)
    if form == 0:
        return compose("number", call, give(binary(rng, "r", numbers)))
    if form == 1:
        pick, other = largest_or_smallest(rng), constant(rng)
        return compose(
            "number",
            call,
            Phrase(f"p = {pick}(r, {other.code})", f"set p to {pick} of r and {other.words}"),
            give(term(rng, "p", ("r",))),
        )
    return compose(
        "number",
        call,
        when(rng, comparison(rng, "r", numbers)),
        ("    ", give(binary(rng, "r", numbers))),
        otherwise(term(rng, "r")),
    )


def _on_numbers(rng: Random, call: Phrase, numbers: Sequence[str]) -> Shape:
    form = rng.randrange(3)
    if form == 0:
        return compose("numbers", call, give(slice_of(rng, "r")))
    if form == 1:
        value = binary(rng, "x", numbers)
        return compose(
            "numbers", call, give(Phrase(f"[{value.code} for x in r]", f"list of {value.words} for x in r"))
        )
    return compose(
        "number",
        call,
        start(rng),
        Phrase("for x in r:", "for x in r"),
        ("    ", update(rng, term(rng, "x", numbers))),
        ("", "return total"),
    )


def _on_text(rng: Random, call: Phrase, text: str) -> Shape:
    words = "r" if text == "r" else "r joined"
    letter = rng.choice("eouxz")
    count = rng.randint(2, 4)
    return compose(
        "text",
        call,
        give(
            rng.choice(
                (
                    Phrase(f'{text} + "{letter}"', f"{words} plus {letter}"),
                    Phrase(f'"{letter}" + {text}', f"{letter} plus {words}"),
                    Phrase(f"{text} * {count}", f"{words} times {count}"),
                )
            )
        ),
    )
