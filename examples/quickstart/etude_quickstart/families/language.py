"""The controlled English of the generated functions: one phrase for one construct, in every family.

A docstring is the function read aloud, statement by statement, so it determines the code, and what the
reader of one family learns holds in all others. The vocabulary:

    x > a           x above a                   total = 3        start at 3
    x < a           x below a                   total += x       add x
    x >= a          x at least a                total -= x       subtract x
    x <= a          x at most a                 total *= x       multiply by x
    x == a          x equal to a                p = x            set p to x
    x != a          x other than a              return x         return x
    x + 2           x plus 2                    out.append(x)    append x
    x - 2           x minus 2                   if x > a:        if x above a
    x * 2           x times 2                   if not x > a:    unless x above a
    x // 2          x over 2                    range(a, b)      from a until b
    x % 2           x modulo 2                  range(a, b + 1)  from a through b
    xs[0], xs[-1]   first of xs, last of xs     xs[:a], xs[a:]   first a of xs, xs without first a
    xs[i]           xs at i                     xs[i + 1]        xs after i
    len(xs)         length of xs                max(a, b)        max of a and b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

COMPARISONS: dict[str, str] = {
    ">": "above",
    "<": "below",
    ">=": "at least",
    "<=": "at most",
    "==": "equal to",
    "!=": "other than",
}
"""Python comparison -> its words."""

OPERATORS: dict[str, str] = {"+": "plus", "-": "minus", "*": "times", "//": "over", "%": "modulo"}
"""Python binary operator -> its words."""

AUGMENTED: dict[str, str] = {"+=": "add", "-=": "subtract", "*=": "multiply by"}
"""Python augmented assignment to `total` -> its words."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """A piece of code and the same thing in words."""

    code: str
    words: str


def constant(rng: Random, low: int = 1, high: int = 9) -> Phrase:
    """A number of one digit from `low` through `high`."""
    digit = str(rng.randint(low, high))
    return Phrase(digit, digit)


def start(rng: Random) -> Phrase:
    """`total = 0`, or sometimes another initial value."""
    digit = "0" if rng.random() < 0.6 else str(rng.randint(1, 9))
    return Phrase(f"total = {digit}", f"start at {digit}")


def binary(rng: Random, left: str, others: Sequence[str] = ()) -> Phrase:
    """`left` combined with a constant or with one of `others`; divisors are constants from 2 on."""
    operator = rng.choice("++--**/%")
    if operator in "/%":
        symbol = "//" if operator == "/" else "%"
        right = str(rng.randint(2, 9 if symbol == "%" else 4))
    else:
        symbol = operator
        use_other = bool(others) and rng.random() < 0.4
        right = rng.choice(others) if use_other else str(rng.randint(2 if symbol == "*" else 1, 9))
    return Phrase(f"{left} {symbol} {right}", f"{left} {OPERATORS[symbol]} {right}")


def term(rng: Random, left: str, others: Sequence[str] = ()) -> Phrase:
    """`left` alone or a `binary` of it."""
    return Phrase(left, left) if rng.random() < 0.35 else binary(rng, left, others)


def comparison(rng: Random, left: str, others: Sequence[str] = ()) -> Phrase:
    """`left` (sometimes its remainder) against a constant or one of `others`."""
    words = left
    if rng.random() < 0.2:
        divisor = rng.randint(2, 5)
        left, words = f"{left} % {divisor}", f"{left} modulo {divisor}"
        symbol = rng.choice(("==", "!="))
        right = str(rng.randint(0, divisor - 1))
    else:
        symbol = rng.choice((">", "<", ">=", "<=", ">", "<", ">=", "<=", "==", "!="))
        use_other = bool(others) and rng.random() < 0.6
        right = rng.choice(others) if use_other else str(rng.randint(1, 8))
    return Phrase(f"{left} {symbol} {right}", f"{words} {COMPARISONS[symbol]} {right}")


def joined(rng: Random, left: Phrase, right: Phrase) -> Phrase:
    """Two comparisons with `and` or `or` between them."""
    word = rng.choice(("and", "or"))
    return Phrase(f"{left.code} {word} {right.code}", f"{left.words} {word} {right.words}")


def when(rng: Random, test: Phrase) -> Phrase:
    """`if test:`, or sometimes `if not test:`, which reads "unless"."""
    if rng.random() < 0.15:
        return Phrase(f"if not {test.code}:", f"unless {test.words}")
    return Phrase(f"if {test.code}:", f"if {test.words}")


def update(rng: Random, amount: Phrase, symbols: Sequence[str] = ("+=", "-=")) -> Phrase:
    """`total += amount` or another augmented assignment of `symbols`."""
    symbol = rng.choice(symbols)
    return Phrase(f"total {symbol} {amount.code}", f"{AUGMENTED[symbol]} {amount.words}")


def give(value: Phrase) -> Phrase:
    """`return value`."""
    return Phrase(f"return {value.code}", f"return {value.words}")


def otherwise(value: Phrase) -> Phrase:
    """The `return` that is reached if no earlier one was."""
    return Phrase(f"return {value.code}", f"else return {value.words}")


def total_result(rng: Random, others: Sequence[str] = ()) -> Phrase:
    """`return total`, which the docstring does not mention, or an expression of it, which it does."""
    if rng.random() < 0.7:
        return Phrase("return total", "")
    return give(binary(rng, "total", others))


def span(rng: Random, first: str, last: str, name: str = "i") -> Phrase:
    """A `for` over a half-open ("until") or closed ("through") range of whole numbers."""
    if rng.random() < 0.5:
        return Phrase(f"for {name} in range({first}, {last}):", f"for {name} from {first} until {last}")
    return Phrase(f"for {name} in range({first}, {last} + 1):", f"for {name} from {first} through {last}")


def largest_or_smallest(rng: Random) -> str:
    """`max` or `min`: the word is the same in code and in English."""
    return rng.choice(("max", "min"))
