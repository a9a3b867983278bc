"""Families that choose between results: branches, bounds, flags."""

from __future__ import annotations

from random import Random

from etude_quickstart.families.language import (
    COMPARISONS,
    Phrase,
    binary,
    comparison,
    constant,
    give,
    joined,
    otherwise,
    term,
    update,
    when,
)
from etude_quickstart.families.shape import Family, Shape, compose

_NUMBERS = ("a", "b", "c")


def branch(rng: Random) -> Shape:
    """One of two results."""
    first, second = rng.sample(_NUMBERS, 2)
    return compose(
        "number",
        when(rng, comparison(rng, first, (second,))),
        ("    ", give(binary(rng, first, (second,)))),
        otherwise(term(rng, second, (first,))),
    )


def and_or(rng: Random) -> Shape:
    """One of two results, by two comparisons."""
    first, second = rng.sample(_NUMBERS, 2)
    test = joined(rng, comparison(rng, first, (second,)), comparison(rng, second))
    return compose(
        "number",
        Phrase(f"if {test.code}:", f"if {test.words}"),
        ("    ", give(term(rng, first, (second,)))),
        otherwise(binary(rng, second)),
    )


def three_way(rng: Random) -> Shape:
    """One of three results."""
    first, second = rng.sample(_NUMBERS, 2)
    symbol = rng.choice((">", "<"))
    return compose(
        "number",
        Phrase(f"if {first} {symbol} {second}:", f"if {first} {COMPARISONS[symbol]} {second}"),
        ("    ", give(binary(rng, first))),
        when(rng, comparison(rng, second)),
        ("    ", give(term(rng, second, (first,)))),
        otherwise(rng.choice((constant(rng), Phrase(first, first)))),
    )


def clamp(rng: Random) -> Shape:
    """A number held between two bounds."""
    low, high = ("b", "c") if rng.random() < 0.5 else (str(rng.randint(1, 4)), str(rng.randint(5, 8)))
    return compose(
        "number",
        Phrase(f"if a < {low}:", f"if a below {low}"),
        ("    ", give(_bound(rng, low))),
        Phrase(f"if a > {high}:", f"if a above {high}"),
        ("    ", give(_bound(rng, high))),
        otherwise(term(rng, "a")),
    )


def _bound(rng: Random, bound: str) -> Phrase:
    return Phrase(bound, bound) if bound.isdigit() else term(rng, bound)


def flag_choice(rng: Random) -> Shape:
    """A result chosen by a flag."""
    first, second = rng.sample(_NUMBERS, 2)
    return compose(
        "number",
        Phrase(f"total = {first}", f"start at {first}"),
        when(rng, Phrase("flag", "flag")),
        ("    ", update(rng, term(rng, second))),
        give(binary(rng, "total", (second,))),
    )


def flag_test(rng: Random) -> Shape:
    """A comparison that a flag overrules."""
    first, second = rng.sample(_NUMBERS, 2)
    answer = rng.choice(("True", "False"))
    test = comparison(rng, first, (second,))
    return compose(
        "flag",
        when(rng, Phrase("flag", "flag")),
        ("    ", Phrase(f"return {answer}", f"return {answer}")),
        otherwise(test),
    )


def inside(rng: Random) -> Shape:
    """Whether a number lies within, or outside, bounds."""
    test = joined(rng, comparison(rng, "a", ("b",)), comparison(rng, "a", ("c",)))
    if rng.random() < 0.3:
        return compose("flag", Phrase(f"return not ({test.code})", f"return not {test.words}"))
    return compose("flag", give(test))


def early_return(rng: Random) -> Shape:
    """A fixed answer for the empty list, its ends otherwise."""
    first, second = rng.choice((("0", "-1"), ("-1", "0")))
    words = {"0": "first of es", "-1": "last of es"}
    symbol, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    ends = Phrase(f"es[{first}] {symbol} es[{second}]", f"{words[first]} {word} {words[second]}")
    near = binary(rng, f"es[{first}]", ("a",))
    near = Phrase(near.code, near.words.replace(f"es[{first}]", words[first]))
    return compose(
        "number",
        Phrase("if not es:", "unless es"),
        ("    ", give(rng.choice((constant(rng), Phrase("a", "a"))))),
        otherwise(rng.choice((ends, near))),
    )


def longer(rng: Random) -> Shape:
    """Compares two lists by their lengths."""
    symbol = rng.choice((">", "<", ">=", "<="))
    test = Phrase(f"if len(xs) {symbol} len(ys):", f"if length of xs {COMPARISONS[symbol]} length of ys")
    tail = binary(rng, rng.choice(("xs", "ys")) + "[0]", ("a",))
    words = tail.words.replace("xs[0]", "first of xs").replace("ys[0]", "first of ys")
    return compose(
        "number",
        test,
        ("    ", give(Phrase(tail.code, words))),
        otherwise(rng.choice((Phrase("len(ys)", "length of ys"), constant(rng), Phrase("a", "a")))),
    )


FAMILIES = (
    Family("branch", branch),
    Family("and_or", and_or),
    Family("three_way", three_way),
    Family("clamp", clamp),
    Family("flag_choice", flag_choice),
    Family("flag_test", flag_test),
    Family("inside", inside),
    Family("early_return", early_return),
    Family("longer", longer),
)
