"""Families that work on a few numbers: chains, parts, swaps, defaults, repetition, digits."""

from __future__ import annotations

from random import Random

from etude_quickstart.families.language import (
    Phrase,
    binary,
    comparison,
    constant,
    give,
    largest_or_smallest,
    span,
    start,
    term,
    total_result,
    update,
    when,
)
from etude_quickstart.families.shape import Family, Shape, compose

_NUMBERS = ("a", "b", "c")


def _pick(rng: Random, count: int) -> list[str]:
    return rng.sample(_NUMBERS, count)


def chain(rng: Random) -> Shape:
    """A value, two changes to it, a result."""
    first, second = _pick(rng, 2)
    value = binary(rng, first, (second,))
    return compose(
        "number",
        Phrase(f"total = {value.code}", f"start at {value.words}"),
        update(rng, term(rng, second, (first,)), ("+=", "-=", "*=")),
        update(rng, constant(rng)),
        total_result(rng, (first, second)),
    )


def two_parts(rng: Random) -> Shape:
    """Two named parts, combined."""
    first, second = _pick(rng, 2)
    left, right = binary(rng, first), binary(rng, second, (first,))
    return compose(
        "number",
        Phrase(f"p = {left.code}", f"set p to {left.words}"),
        Phrase(f"q = {right.code}", f"set q to {right.words}"),
        give(
            rng.choice(
                (Phrase("p - q", "p minus q"), Phrase("p + q", "p plus q"), Phrase("p * q", "p times q"))
            )
        ),
    )


def swap(rng: Random) -> Shape:
    """Swaps two numbers under a condition and combines them unevenly."""
    first, second = _pick(rng, 2)
    return compose(
        "number",
        when(rng, comparison(rng, first, (second,))),
        ("    ", Phrase(f"{first}, {second} = {second}, {first}", f"swap {first} and {second}")),
        Phrase(f"total = {first} * 2", f"start at {first} times 2"),
        update(rng, term(rng, second)),
        total_result(rng, (first,)),
    )


def default_argument(rng: Random) -> Shape:
    """A parameter with a default."""
    first, second = _pick(rng, 2)
    value = binary(rng, first, (second,))
    if second not in value.code:
        value = Phrase(f"{first} - {second}", f"{first} minus {second}")
    return compose(
        "number",
        Phrase(f"total = {value.code}", f"start at {value.words}"),
        update(rng, constant(rng)),
        total_result(rng, (first,)),
        defaults=((second, str(rng.randint(1, 9))),),
    )


def digits(rng: Random) -> Shape:
    """Goes over the decimal digits of a number."""
    return compose(
        "number",
        start(rng),
        Phrase("for digit in str(a):", "for digit in a"),
        ("    ", "x = int(digit)"),
        ("    ", when(rng, comparison(rng, "x", ("b",)))),
        ("        ", update(rng, term(rng, "x", ("b",)))),
        ("", "return total"),
    )


def repeat(rng: Random) -> Shape:
    """The same change several times."""
    first, second = _pick(rng, 2)
    change = binary(rng, "total", (first, second))
    return compose(
        "number",
        Phrase(f"total = {first}", f"start at {first}"),
        span(rng, "0", "n"),
        ("    ", Phrase(f"total = {change.code}", f"set total to {change.words}")),
        ("    ", update(rng, rng.choice((constant(rng), Phrase("i", "i"), Phrase(second, second))))),
        total_result(rng, (second,)),
    )


def extreme_of_two(rng: Random) -> Shape:
    """The larger or the smaller of two expressions."""
    first, second = _pick(rng, 2)
    pick = largest_or_smallest(rng)
    left, right = term(rng, first, (second,)), binary(rng, second)
    best = Phrase(f"{pick}({left.code}, {right.code})", f"{pick} of {left.words} and {right.words}")
    return compose(
        "number",
        Phrase(f"total = {best.code}", f"start at {best.words}"),
        update(rng, rng.choice((constant(rng), Phrase(first, first)))),
        total_result(rng, (second,)),
    )


FAMILIES = (
    Family("chain", chain),
    Family("two_parts", two_parts),
    Family("swap", swap),
    Family("default_argument", default_argument),
    Family("digits", digits),
    Family("repeat", repeat),
    Family("extreme_of_two", extreme_of_two),
)
