"""Families that look for one item, for the best item, or whether there is one."""

from __future__ import annotations

from random import Random

from etude_quickstart.families.language import (
    COMPARISONS,
    Phrase,
    comparison,
    constant,
    give,
    joined,
    largest_or_smallest,
    span,
    term,
    when,
)
from etude_quickstart.families.shape import Family, Shape, compose

_EACH = Phrase("for x in xs:", "for x in xs")


def _finally(value: Phrase) -> Phrase:
    return Phrase(f"return {value.code}", f"then return {value.words}")


def first_value(rng: Random) -> Shape:
    """The first item that passes a test, or something else."""
    return compose(
        "number",
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", give(term(rng, "x", ("a", "b")))),
        _finally(rng.choice((constant(rng, 0), Phrase("a", "a"), Phrase("b", "b")))),
    )


def first_index(rng: Random) -> Shape:
    """The position of the first item that passes a test."""
    first = rng.randint(0, 3)
    return compose(
        "number",
        Phrase(f"for i, x in enumerate(xs, {first}):", f"for i, x in xs numbered from {first}"),
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", give(term(rng, "i", ("x", "a")))),
        _finally(rng.choice((constant(rng, 0), Phrase("a", "a"), Phrase("-1", "-1")))),
    )


def extreme(rng: Random) -> Shape:
    """The largest or smallest item, combined with something."""
    pick = largest_or_smallest(rng)
    key = rng.random() < 0.5
    divisor = rng.randint(3, 9)
    best = (
        Phrase(
            f"best = {pick}(xs, key=lambda x: x % {divisor})",
            f"set best to {pick} of xs by x modulo {divisor}",
        )
        if key
        else Phrase(f"best = {pick}(xs)", f"set best to {pick} of xs")
    )
    return compose("number", best, give(term(rng, "best", ("a",))))


def extreme_position(rng: Random) -> Shape:
    """Where the largest or smallest item is."""
    symbol = rng.choice((">", "<", ">=", "<="))
    return compose(
        "number",
        Phrase("best = 0", "set best to 0"),
        Phrase("for i in range(len(xs)):", "for i from 0 until length of xs"),
        (
            "    ",
            Phrase(f"if xs[i] {symbol} xs[best]:", f"if xs at i {COMPARISONS[symbol]} xs at best"),
        ),
        ("        ", Phrase("best = i", "set best to i")),
        give(term(rng, "best", ("a",))),
    )


def limited_extreme(rng: Random) -> Shape:
    """The best item within a bound."""
    symbol = rng.choice((">", "<"))
    test = joined(
        rng, Phrase(f"x {symbol} best", f"x {COMPARISONS[symbol]} best"), comparison(rng, "x", ("b",))
    )
    return compose(
        "number",
        Phrase("best = a", "set best to a"),
        _EACH,
        ("    ", Phrase(f"if {test.code}:", f"if {test.words}")),
        ("        ", Phrase("best = x", "set best to x")),
        give(term(rng, "best", ("a",))),
    )


def any_all(rng: Random) -> Shape:
    """Whether some or all items pass a test, as one expression."""
    word = rng.choice(("any", "all"))
    test = comparison(rng, "x", ("a",))
    each = Phrase(f"{word}({test.code} for x in xs)", f"{word} of {test.words} for x in xs")
    if rng.random() < 0.5:
        extra = comparison(rng, "b")
        return compose("flag", give(joined(rng, each, extra)))
    return compose("flag", give(each))


def contains(rng: Random) -> Shape:
    """Whether an item passes a test, by a loop."""
    found, missing = rng.choice((("True", "False"), ("False", "True")))
    return compose(
        "flag",
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a", "b")))),
        ("        ", Phrase(f"return {found}", f"return {found}")),
        Phrase(f"return {missing}", f"then return {missing}"),
    )


def last_match(rng: Random) -> Shape:
    """The last item that passes a test."""
    value = term(rng, "x", ("a", "b"))
    return compose(
        "number",
        Phrase("best = b", "set best to b"),
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", Phrase(f"best = {value.code}", f"set best to {value.words}")),
        give(term(rng, "best", ("a",))),
    )


def span_flag(rng: Random) -> Shape:
    """Whether a number of a range passes a test."""
    found, missing = rng.choice((("True", "False"), ("False", "True")))
    return compose(
        "flag",
        span(rng, rng.choice(("a", "0", "1")), "b"),
        ("    ", when(rng, comparison(rng, "i", ("c",)))),
        ("        ", Phrase(f"return {found}", f"return {found}")),
        Phrase(f"return {missing}", f"then return {missing}"),
    )


FAMILIES = (
    Family("first_value", first_value),
    Family("first_index", first_index),
    Family("extreme", extreme),
    Family("extreme_position", extreme_position),
    Family("limited_extreme", limited_extreme),
    Family("any_all", any_all),
    Family("contains", contains),
)

HELD_OUT = (Family("last_match", last_match), Family("span_flag", span_flag))
