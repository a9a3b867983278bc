"""Families that fold a list or a range into one number."""

from __future__ import annotations

from random import Random

from etude_quickstart.families.language import (
    Phrase,
    comparison,
    give,
    joined,
    largest_or_smallest,
    span,
    start,
    term,
    total_result,
    update,
    when,
)
from etude_quickstart.families.shape import Family, Shape, compose

_EACH = Phrase("for x in xs:", "for x in xs")


def filtered_sum(rng: Random) -> Shape:
    """Adds up what passes a test."""
    return compose(
        "number",
        start(rng),
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", update(rng, term(rng, "x", ("a", "b")))),
        total_result(rng, ("b",)),
    )


def generator_sum(rng: Random) -> Shape:
    """Adds up what passes a test, as one expression."""
    value, test = term(rng, "x", ("b",)), comparison(rng, "x", ("a",))
    if rng.random() < 0.3:
        value = Phrase("1", "1")
    summed = Phrase(
        f"sum({value.code} for x in xs if {test.code})", f"sum of {value.words} for x in xs if {test.words}"
    )
    return compose("number", give(summed))


def product(rng: Random) -> Shape:
    """Multiplies what passes a test."""
    first = str(rng.randint(1, 3))
    return compose(
        "number",
        Phrase(f"total = {first}", f"start at {first}"),
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", update(rng, term(rng, "x", ("a",)), ("*=",))),
        total_result(rng, ("a",)),
    )


def add_or_subtract(rng: Random) -> Shape:
    """Adds what passes a test and does something else with the rest."""
    return compose(
        "number",
        start(rng),
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", update(rng, term(rng, "x"))),
        ("    ", Phrase("else:", "else")),
        ("        ", update(rng, term(rng, rng.choice(("a", "b"))))),
        ("", "return total"),
    )


def running_totals(rng: Random) -> Shape:
    """The list of all partial sums."""
    return compose(
        "numbers",
        ("", "out = []"),
        start(rng),
        _EACH,
        ("    ", update(rng, term(rng, "x", ("a",)))),
        ("    ", _append(term(rng, "total", ("a",)))),
        ("", "return out"),
    )


def range_sum(rng: Random) -> Shape:
    """Adds up over a range."""
    first = rng.choice(("a", "0", "1", "2"))
    return compose(
        "number",
        start(rng),
        span(rng, first, "b"),
        ("    ", update(rng, term(rng, "i", ("a",)))),
        total_result(rng, ("b",)),
    )


def range_filter(rng: Random) -> Shape:
    """Adds up what passes a test over a range."""
    return compose(
        "number",
        start(rng),
        span(rng, rng.choice(("a", "1")), "b"),
        ("    ", when(rng, comparison(rng, "i", ("a",)))),
        ("        ", update(rng, term(rng, "i", ("a",)))),
        ("", "return total"),
    )


def weighted_sum(rng: Random) -> Shape:
    """Adds up items with their positions."""
    first = rng.randint(0, 3)
    each = Phrase(f"for i, x in enumerate(xs, {first}):", f"for i, x in xs numbered from {first}")
    return compose(
        "number",
        start(rng),
        each,
        ("    ", update(rng, term(rng, "x", ("i", "i", "a")))),
        ("    ", update(rng, term(rng, "i", ("x", "a")))),
        ("", "return total"),
    )


def zip_sum(rng: Random) -> Shape:
    """Adds up over two lists at once."""
    return compose(
        "number",
        start(rng),
        Phrase("for x, y in zip(xs, ys):", "for x, y in xs and ys"),
        ("    ", when(rng, comparison(rng, "x", ("y", "y", "a")))),
        ("        ", update(rng, term(rng, rng.choice("xy"), ("x", "y")))),
        total_result(rng, ("a",)),
    )


def capped_sum(rng: Random) -> Shape:
    """A sum that is cut off at each step."""
    pick = largest_or_smallest(rng)
    return compose(
        "number",
        start(rng),
        _EACH,
        ("    ", update(rng, term(rng, "x"))),
        ("    ", Phrase(f"total = {pick}(total, a)", f"set total to {pick} of total and a")),
        total_result(rng, ("a",)),
    )


def zip_either(rng: Random) -> Shape:
    """Adds up over two lists at once what passes either or both of two tests."""
    test = joined(rng, comparison(rng, "x", ("a",)), comparison(rng, "y", ("a", "b")))
    return compose(
        "number",
        start(rng),
        Phrase("for x, y in zip(xs, ys):", "for x, y in xs and ys"),
        ("    ", Phrase(f"if {test.code}:", f"if {test.words}")),
        ("        ", update(rng, term(rng, rng.choice("xy"), ("x", "y")))),
        total_result(rng, ("a",)),
    )


def _append(value: Phrase) -> Phrase:
    return Phrase(f"out.append({value.code})", f"append {value.words}")


FAMILIES = (
    Family("filtered_sum", filtered_sum),
    Family("generator_sum", generator_sum),
    Family("product", product),
    Family("add_or_subtract", add_or_subtract),
    Family("running_totals", running_totals),
    Family("range_sum", range_sum),
    Family("range_filter", range_filter),
    Family("weighted_sum", weighted_sum),
    Family("zip_sum", zip_sum),
    Family("capped_sum", capped_sum),
)

HELD_OUT = (Family("zip_either", zip_either),)
