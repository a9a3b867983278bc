"""Families that make a list out of a list."""

from __future__ import annotations

from random import Random

from etude_quickstart.families.language import (
    OPERATORS,
    Phrase,
    binary,
    comparison,
    give,
    term,
    when,
)
from etude_quickstart.families.shape import Family, Shape, compose

_EACH = Phrase("for x in xs:", "for x in xs")
_OUT = ("", "out = []")
_DONE = ("", "return out")


def _append(value: Phrase) -> Phrase:
    return Phrase(f"out.append({value.code})", f"append {value.words}")


def slice_of(rng: Random, name: str) -> Phrase:
    """A part of the list `name`: from an end, without an end, every so many."""
    size = rng.choice(("a", "1", "2", "3"))
    fixed = str(rng.randint(1, 3))
    step = str(rng.randint(2, 3))
    return rng.choice(
        (
            Phrase(f"{name}[:{size}]", f"first {size} of {name}"),
            Phrase(f"{name}[{size}:]", f"{name} without first {size}"),
            Phrase(f"{name}[-{fixed}:]", f"last {fixed} of {name}"),
            Phrase(f"{name}[:-{fixed}]", f"{name} without last {fixed}"),
            Phrase(f"{name}[::{step}]", f"every {step} of {name}"),
        )
    )


def filter_map(rng: Random) -> Shape:
    """Keeps what passes a test, changed."""
    return compose(
        "numbers",
        _OUT,
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", _append(term(rng, "x", ("a", "b")))),
        _DONE,
    )


def comprehension(rng: Random) -> Shape:
    """Keeps what passes a test, changed, as one expression."""
    value, test = term(rng, "x", ("b",)), comparison(rng, "x", ("a",))
    return compose(
        "numbers",
        give(
            Phrase(
                f"[{value.code} for x in xs if {test.code}]",
                f"list of {value.words} for x in xs if {test.words}",
            )
        ),
    )


def positions(rng: Random) -> Shape:
    """The positions of what passes a test."""
    first = rng.randint(0, 3)
    return compose(
        "numbers",
        _OUT,
        Phrase(f"for i, x in enumerate(xs, {first}):", f"for i, x in xs numbered from {first}"),
        ("    ", when(rng, comparison(rng, rng.choice("xi"), ("a",)))),
        ("        ", _append(term(rng, rng.choice("xi"), ("i", "a")))),
        _DONE,
    )


def slices(rng: Random) -> Shape:
    """A part of a part of a list."""
    part = slice_of(rng, "xs")
    return compose(
        "numbers",
        Phrase(f"out = {part.code}", f"set out to {part.words}"),
        give(slice_of(rng, "out")),
    )


def slice_total(rng: Random) -> Shape:
    """A figure of a part of a list."""
    part = slice_of(rng, "xs")
    whole = rng.choice(("sum", "len"))
    words = {"sum": "sum of out", "len": "length of out"}[whole]
    amount = binary(rng, f"{whole}(out)", ("a",))
    return compose(
        "number",
        Phrase(f"out = {part.code}", f"set out to {part.words}"),
        give(Phrase(amount.code, amount.words.replace(f"{whole}(out)", words))),
    )


def windows(rng: Random) -> Shape:
    """Neighbours combined."""
    symbol = rng.choice(("+", "-", "*"))
    left, right = rng.choice((("xs[i + 1]", "xs[i]"), ("xs[i]", "xs[i + 1]")))
    words = {"xs[i]": "xs at i", "xs[i + 1]": "xs after i"}
    pair = Phrase(f"{left} {symbol} {right}", f"{words[left]} {OPERATORS[symbol]} {words[right]}")
    first = rng.choice(("0", "1", "a"))
    return compose(
        "numbers",
        _OUT,
        Phrase(f"for i in range({first}, len(xs) - 1):", f"for i from {first} until length of xs minus 1"),
        ("    ", _append(pair)),
        _DONE,
    )


def dedupe(rng: Random) -> Shape:
    """Keeps what is not yet (or already) there."""
    value = term(rng, "x", ("a",))
    return compose(
        "numbers",
        rng.choice((Phrase("out = []", ""), Phrase("out = [a]", "set out to list of a"))),
        _EACH,
        ("    ", Phrase(f"p = {value.code}", f"set p to {value.words}")),
        ("    ", Phrase("if p not in out:", "if p not in out")),
        ("        ", _append(term(rng, rng.choice(("p", "x"))))),
        _DONE,
    )


def sorted_part(rng: Random) -> Shape:
    """A part of the sorted or reversed list."""
    order = rng.choice(
        (
            Phrase("sorted(xs, reverse=True)", "xs sorted down"),
            Phrase("sorted(xs, reverse=False)", "xs sorted up"),
            Phrase("xs[::-1]", "xs reversed"),
        )
    )
    return compose(
        "numbers",
        Phrase(f"out = {order.code}", f"set out to {order.words}"),
        give(slice_of(rng, "out")),
    )


def sort_key(rng: Random) -> Shape:
    """The list sorted by a remainder."""
    divisor = str(rng.randint(2, 9))
    direction, word = rng.choice((("True", "down"), ("False", "up")))
    order = Phrase(
        f"out = sorted(xs, key=lambda x: x % {divisor}, reverse={direction})",
        f"set out to xs sorted {word} by x modulo {divisor}",
    )
    return compose("numbers", order, give(slice_of(rng, "out")))


def flatten(rng: Random) -> Shape:
    """Rows made into one list."""
    return compose(
        "numbers",
        _OUT,
        Phrase("for row in rows:", "for row in rows"),
        ("    ", Phrase("for x in row:", "for x in row")),
        ("        ", when(rng, comparison(rng, "x", ("a",)))),
        ("            ", _append(term(rng, "x", ("a",)))),
        _DONE,
    )


def partition(rng: Random) -> Shape:
    """What passes a test, before or after the rest."""
    first, second = rng.choice((("low", "high"), ("high", "low")))
    return compose(
        "numbers",
        ("", "low = []"),
        ("", "high = []"),
        _EACH,
        ("    ", when(rng, comparison(rng, "x", ("a",)))),
        ("        ", Phrase("low.append(x)", "append x to low")),
        ("    ", Phrase("else:", "else")),
        ("        ", _append_high(term(rng, "x", ("a",)))),
        Phrase(f"return {first} + {second}", f"return {first} plus {second}"),
    )


def _append_high(value: Phrase) -> Phrase:
    return Phrase(f"high.append({value.code})", f"append {value.words} to high")


def membership(rng: Random) -> Shape:
    """What is, or is not, in another list."""
    word = rng.choice(("in", "not in"))
    value = term(rng, "x", ("a",))
    return compose(
        "numbers",
        Phrase("seen = set(ys)", "set seen to set of ys"),
        give(
            Phrase(
                f"[{value.code} for x in xs if x {word} seen]",
                f"list of {value.words} for x in xs if x {word} seen",
            )
        ),
    )


def zip_list(rng: Random) -> Shape:
    """Two lists combined item by item."""
    value = binary(rng, rng.choice("xy"), ("x", "y", "a"))
    return compose(
        "numbers",
        _OUT,
        Phrase("for x, y in zip(xs, ys):", "for x, y in xs and ys"),
        ("    ", when(rng, comparison(rng, rng.choice("xy"), ("a",)))),
        ("        ", _append(value)),
        _DONE,
    )


FAMILIES = (
    Family("filter_map", filter_map),
    Family("comprehension", comprehension),
    Family("positions", positions),
    Family("slices", slices),
    Family("slice_total", slice_total),
    Family("windows", windows),
    Family("dedupe", dedupe),
    Family("sorted_part", sorted_part),
    Family("sort_key", sort_key),
    Family("flatten", flatten),
    Family("partition", partition),
    Family("membership", membership),
    Family("zip_list", zip_list),
)
