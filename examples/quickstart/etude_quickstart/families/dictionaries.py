"""Families that build, read and count dictionaries. Keys are letters or numbers, values numbers."""

from __future__ import annotations

from random import Random

from etude_quickstart.families.language import (
    Phrase,
    binary,
    comparison,
    constant,
    give,
    otherwise,
    start,
    term,
    total_result,
    update,
    when,
)
from etude_quickstart.families.shape import Family, Shape, compose


def counting(rng: Random) -> Shape:
    """Counts, or adds up, by key."""
    key = rng.choice((Phrase("x", "x"), binary(rng, "x")))
    amount = rng.choice((constant(rng), Phrase("x", "x"), Phrase("a", "a")))
    first = str(rng.choice((0, 0, rng.randint(1, 9))))
    return compose(
        "table",
        ("", "out = {}"),
        Phrase("for x in xs:", "for x in xs"),
        ("    ", Phrase(f"p = {key.code}", f"set p to {key.words}")),
        (
            "    ",
            Phrase(
                f"out[p] = out.get(p, {first}) + {amount.code}",
                f"set out at p to out at p or {first} plus {amount.words}",
            ),
        ),
        ("", "return out"),
    )


def building(rng: Random) -> Shape:
    """Maps what passes a test."""
    key, value = term(rng, "x", ("a",)), binary(rng, "x", ("a", "b"))
    return compose(
        "table",
        ("", "out = {}"),
        Phrase("for x in xs:", "for x in xs"),
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", Phrase(f"out[{key.code}] = {value.code}", f"set out at {key.words} to {value.words}")),
        ("", "return out"),
    )


def value_sum(rng: Random) -> Shape:
    """Adds up the values that pass a test."""
    return compose(
        "number",
        start(rng),
        Phrase("for key, v in d.items():", "for key, v in d"),
        ("    ", when(rng, comparison(rng, "v", ("a",)))),
        ("        ", update(rng, term(rng, "v", ("a", "b")))),
        total_result(rng, ("a",)),
    )


def value_filter(rng: Random) -> Shape:
    """Keeps the entries that pass a test, with changed values."""
    test = comparison(rng, "v", ("a",))
    if rng.random() < 0.25:
        symbol, words = rng.choice((("==", "equal to"), ("!=", "other than")))
        test = Phrase(f"key {symbol} t", f"key {words} t")
    return compose(
        "table",
        ("", "out = {}"),
        Phrase("for key, v in d.items():", "for key, v in d"),
        ("    ", when(rng, test)),
        ("        ", _set(term(rng, "v", ("a", "b")))),
        ("", "return out"),
    )


def _set(value: Phrase) -> Phrase:
    return Phrase(f"out[key] = {value.code}", f"set out at key to {value.words}")


def lookup(rng: Random) -> Shape:
    """A value, or something else where there is none."""
    found = binary(rng, "d[t]", ("a",))
    return (
        compose(
            "number",
            rng.choice((Phrase("if t in d:", "if t in d"), Phrase("if t not in d:", "if t not in d"))),
            ("    ", give(term(rng, "a"))),
            otherwise(Phrase(f"len(d) + {(size := rng.randint(1, 9))}", f"length of d plus {size}")),
        )
        if rng.random() < 0.3
        else compose(
            "number",
            Phrase("if t in d:", "if t in d"),
            ("    ", give(Phrase(found.code, found.words.replace("d[t]", "d at t")))),
            otherwise(rng.choice((term(rng, "a"), constant(rng, 0)))),
        )
    )


def get_default(rng: Random) -> Shape:
    """A value with a default, combined."""
    default = rng.choice((constant(rng, 0), Phrase("a", "a")))
    return compose(
        "number",
        Phrase(f"total = d.get(t, {default.code})", f"start at d at t or {default.words}"),
        update(rng, rng.choice((constant(rng), Phrase("a", "a"), Phrase("b", "b")))),
        total_result(rng, ("a",)),
    )


FAMILIES = (
    Family("counting", counting),
    Family("building", building),
    Family("value_sum", value_sum),
    Family("value_filter", value_filter),
    Family("lookup", lookup),
    Family("get_default", get_default),
)
