"""Families that work on text and on lists of words."""

from __future__ import annotations

from random import Random

from etude_quickstart.families.language import (
    COMPARISONS,
    Phrase,
    constant,
    give,
    otherwise,
    start,
    update,
    when,
)
from etude_quickstart.families.shape import Family, Shape, compose

_LETTERS = ("e", "o", "u", "x", "z")
"""Letters in literals; none of them is the name of a parameter."""


def _length(rng: Random, name: str) -> Phrase:
    symbol = rng.choice((">", "<", ">=", "<=", "==", "!="))
    bound = rng.choice((constant(rng, 1, 4), Phrase("n", "n")))
    return Phrase(
        f"len({name}) {symbol} {bound.code}", f"length of {name} {COMPARISONS[symbol]} {bound.words}"
    )


def _case(rng: Random, name: str) -> Phrase:
    word = rng.choice(("upper", "lower"))
    return Phrase(f"{name}.{word}()", f"{name} {word}")


def _copies(rng: Random, name: str) -> Phrase:
    count = rng.choice((constant(rng, 2, 3), Phrase("n", "n")))
    return Phrase(f"{name} * {count.code}", f"{name} times {count.words}")


def count_letter(rng: Random) -> Shape:
    """Adds up for each letter that passes a test."""
    test = rng.choice(
        (
            Phrase("ch == t", "ch equal to t"),
            Phrase("ch != t", "ch other than t"),
            Phrase("ch in t", "ch in t"),
            Phrase("ch not in t", "ch not in t"),
        )
    )
    return compose(
        "number",
        start(rng),
        Phrase("for ch in s:", "for ch in s"),
        ("    ", when(rng, test)),
        ("        ", update(rng, rng.choice((constant(rng), Phrase("a", "a"))))),
        ("", "return total"),
    )


def replace_letter(rng: Random) -> Shape:
    """Replaces a letter and does one more thing."""
    old, new = rng.sample(_LETTERS, 2)
    source, word = rng.choice(((f'"{old}"', old), ("t", "t")))
    last = rng.choice(
        (
            _case(rng, "out"),
            _copies(rng, "out"),
            Phrase("out + s", "out plus s"),
            Phrase("s + out", "s plus out"),
        )
    )
    return compose(
        "text",
        Phrase(f'out = s.replace({source}, "{new}")', f"set out to s with {new} for {word}"),
        give(last),
    )


def affix(rng: Random) -> Shape:
    """Tests an end of the text."""
    method, words = rng.choice((("startswith", "starts with"), ("endswith", "ends with")))
    kept, other = rng.sample(
        [
            Phrase("s + t", "s plus t"),
            Phrase("t + s", "t plus s"),
            _copies(rng, "s"),
            Phrase(f"s[{(cut := rng.randint(1, 3))}:]", f"s without first {cut}"),
            Phrase(f"s[:{(size := rng.randint(1, 3))}]", f"first {size} of s"),
        ],
        2,
    )
    return compose(
        "text",
        when(rng, Phrase(f"s.{method}(t)", f"s {words} t")),
        ("    ", give(kept)),
        otherwise(other),
    )


def word_case(rng: Random) -> Shape:
    """Words in upper or lower case, by their length."""
    value = rng.choice(
        (_case(rng, "w"), _copies(rng, "w"), Phrase("w + t", "w plus t"), Phrase("t + w", "t plus w"))
    )
    return compose(
        "words",
        ("", "out = []"),
        Phrase("for w in ws:", "for w in ws"),
        ("    ", when(rng, _length(rng, "w"))),
        ("        ", Phrase(f"out.append({value.code})", f"append {value.words}")),
        ("", "return out"),
    )


def join_words(rng: Random) -> Shape:
    """Puts words together with something between them."""
    letter = rng.choice(_LETTERS)
    glue, word = rng.choice((("t", "t"), (f'"{letter}"', letter)))
    value = rng.choice(
        (
            Phrase("w", "w"),
            _case(rng, "w"),
            _copies(rng, "w"),
            Phrase("w[0]", "first of w"),
            Phrase("w[-1]", "last of w"),
        )
    )
    test = _length(rng, "w")
    return compose(
        "text",
        Phrase(
            f"out = [{value.code} for w in ws if {test.code}]",
            f"set out to list of {value.words} for w in ws if {test.words}",
        ),
        Phrase(f"return {glue}.join(out)", f"return out joined with {word}"),
    )


FAMILIES = (
    Family("count_letter", count_letter),
    Family("replace_letter", replace_letter),
    Family("affix", affix),
    Family("word_case", word_case),
    Family("join_words", join_words),
)
