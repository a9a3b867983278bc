"""From a regular expression to what a matching file must hold: literals joined by AND and OR.

Python's own parser reads the pattern. What Rust's `regex`, which ripgrep uses, reads differently is turned
away before (`_DIFFERENT`) or refused by Python: nothing is required then, and ripgrep searches by itself.

The method is Russ Cox' ("Regular Expression Matching with a Trigram Index", 2012): for each part of the
expression the strings that it matches exactly if they are few, else how it can begin and end, and what must
occur anywhere inside. Every step may only weaken: a file that matches is never excluded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from re import _parser as python_parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from etude.agent.index.grep.query import GrepQuery, Unsure

__all__ = ["ANYTHING", "And", "Literal", "Or", "Plan", "Required", "plan"]

SHORTEST_BYTES = 3
_MOST_STRINGS = 24
_LARGEST_CLASS = 8
_LONGEST_BYTES = 256
_END_BYTES = 24
_MOST_PARTS = 16
_LONGEST_PATTERN = 4_000
"""Of a longer one nothing is known: looking for its literals would take longer than ripgrep does."""
_ODD_FOLDS = frozenset("ksKS")
"""Letters that two characters outside ASCII equal but for case: the Kelvin sign and the long s."""
_ESCAPE = re.compile(r"\\(?:([<>]|[bB]\{)|.)", re.DOTALL)
_DIFFERENT = re.compile(r"\[\^?\]|\[[^\]]*(?:\[|&&|--|~~|\|\|)|\{[^}]*\s")
"""With escapes taken out: a class that begins with its end, classes within classes and operations on them,
spaces in a count."""
_KNOWN_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.UNICODE


@dataclass(frozen=True, slots=True)
class Literal:
    """The file holds these bytes, once its ASCII letters are lower case."""

    text: bytes


@dataclass(frozen=True, slots=True)
class And:
    """All of these hold; none at all: nothing is required."""

    parts: tuple[Required, ...] = ()


@dataclass(frozen=True, slots=True)
class Or:
    """At least one of these holds."""

    parts: tuple[Required, ...]


Required = Literal | And | Or
ANYTHING = And()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the index is asked for one query."""

    required: Required
    odd_folds: bool = False
    """Files that hold the Kelvin sign or the long s must be candidates whatever `required` says."""


def plan(query: GrepQuery) -> Plan:
    """What a file must hold so that `query` can match in it. `ANYTHING` where in doubt."""
    if len(query.pattern) > _LONGEST_PATTERN:
        return Plan(ANYTHING)
    analysis = _Analysis()
    try:
        parsed = _parse(re.escape(query.pattern) if query.fixed else query.pattern)
        folds = query.ignore_case or bool(parsed.state.flags & re.IGNORECASE)
        facts = _open_ended(analysis.sequence(parsed, folds))
    except (Unsure, re.error, RecursionError, OverflowError, UnicodeEncodeError):
        return Plan(ANYTHING)
    return Plan(facts.match, analysis.odd_folds)


def _parse(pattern: str) -> Any:
    """Python's tree of `pattern`. Raises Unsure where Rust's may differ, `re.error` and the like."""
    if any(escape[1] for escape in _ESCAPE.finditer(pattern)):
        raise Unsure(r"\<, \> or \b{start}")
    if _DIFFERENT.search(_ESCAPE.sub("x", pattern)):
        raise Unsure("a class or count")
    parsed = python_parser.parse(pattern)
    if parsed.state.flags & ~_KNOWN_FLAGS:
        raise Unsure("flags")
    return parsed


Strings = frozenset[bytes]
_NOTHING: Strings = frozenset([b""])


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of the text that one part of a pattern matches."""

    exact: Strings | None = None
    """All texts that it can match, if they are few."""
    prefixes: Strings = _NOTHING
    """Each text begins with one of these."""
    suffixes: Strings = _NOTHING
    match: Required = ANYTHING
    """Holds in the file around each text."""


_EMPTY = _Facts(exact=_NOTHING)


@dataclass(slots=True)
class _Analysis:
    """One walk over a tree of Python's parser: lists of (operation, argument)."""

    odd_folds: bool = False

    def sequence(self, parts: Iterable[tuple[Any, Any]], folds: bool) -> _Facts:
        whole = _EMPTY
        for operation, argument in parts:
            whole = _concat(whole, self.part(operation.name, argument, folds))
        return whole

    def part(self, operation: str, argument: Any, folds: bool) -> _Facts:
        match operation:
            case "LITERAL":
                return self.one_of([argument], folds)
            case "IN":
                return self.one_of(_members(argument), folds)
            case "ANY" | "NOT_LITERAL":
                return _Facts()
            case "AT":
                return _EMPTY
            case "BRANCH":
                return _alternation([self.sequence(branch, folds) for branch in argument[1]])
            case "SUBPATTERN":
                _, added, removed, inner = argument
                if (added | removed) & ~_KNOWN_FLAGS:
                    raise Unsure("flags")
                folds = (folds or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
                return self.sequence(inner, folds)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = argument
                return _repeated(self.sequence(inner, folds), least, int(most))
            case _:
                raise Unsure(operation)

    def one_of(self, codes: list[int] | None, folds: bool) -> _Facts:
        """One of a few characters; None: of many."""
        if codes is None or (folds and max(codes) > 127):
            return _Facts()
        chars = {chr(code) for code in codes}
        if not chars.isdisjoint("\n\0"):
            raise Unsure("line feed or NUL")
        self.odd_folds |= folds and not chars.isdisjoint(_ODD_FOLDS)
        return _Facts(exact=frozenset(char.encode("utf-8", "surrogateescape").lower() for char in chars))


def _members(items: Iterable[tuple[Any, Any]]) -> list[int] | None:
    """The characters of a class, if they are few."""
    codes: list[int] = []
    for operation, argument in items:
        match operation.name:
            case "LITERAL":
                codes.append(argument)
            case "RANGE" if argument[1] - argument[0] < _LARGEST_CLASS:
                codes += range(argument[0], argument[1] + 1)
            case _:
                return None
    return codes if len(codes) <= _LARGEST_CLASS else None


def _repeated(part: _Facts, least: int, most: int) -> _Facts:
    if least == 0:
        return _alternation([part, _EMPTY]) if most == 1 else _Facts()
    copies, whole = min(least, 4), _EMPTY
    for _ in range(copies):
        whole = _concat(whole, part)
    return whole if copies == least == most else _open_ended(whole)


def _concat(left: _Facts, right: _Facts) -> _Facts:
    if left.exact is not None and right.exact is not None:
        both = _cross(left.exact, right.exact)
        if both is not None and max(map(len, both)) <= _LONGEST_BYTES:
            return _Facts(exact=both, match=_and([left.match, right.match]))
        if left.exact != _NOTHING:
            left = _open_ended(left)
    if left.exact is None and isinstance(left.match, And) and len(left.match.parts) >= _MOST_PARTS:
        return _Facts(None, left.prefixes, _NOTHING, left.match)  # says enough
    required = [left.match, right.match]
    if left.exact is not None:
        prefixes = _cross(left.exact, _starts(right)) or left.exact
    else:
        prefixes = left.prefixes
        bridge = _cross(left.suffixes, _starts(right))
        if bridge is not None:
            required.append(_any_of(bridge))
        elif right.exact is not None:
            required.append(_any_of(right.exact))
    if right.exact is not None:
        suffixes = _cross(left.suffixes if left.exact is None else left.exact, right.exact) or right.exact
    else:
        suffixes = right.suffixes
        if left.exact is not None:
            required.append(_any_of(_cross(left.exact, right.prefixes) or left.exact))
    return _Facts(None, _shortened(prefixes, True), _shortened(suffixes, False), _and(required))


def _starts(facts: _Facts) -> Strings:
    return facts.exact if facts.exact is not None else facts.prefixes


def _open_ended(facts: _Facts) -> _Facts:
    """The same facts of a text of which only beginning and end are known."""
    if facts.exact is None:
        return facts
    return _Facts(
        None,
        _shortened(facts.exact, True),
        _shortened(facts.exact, False),
        _and([facts.match, _any_of(facts.exact)]),
    )


def _alternation(branches: list[_Facts]) -> _Facts:
    exacts = [branch.exact for branch in branches]
    known = [exact for exact in exacts if exact is not None]
    if len(known) == len(exacts) and all(branch.match == ANYTHING for branch in branches):
        union = frozenset(itertools.chain.from_iterable(known))
        if len(union) <= _MOST_STRINGS:
            return _Facts(exact=union)
    parts = [_open_ended(branch) for branch in branches]
    prefixes = frozenset(itertools.chain.from_iterable(part.prefixes for part in parts))
    suffixes = frozenset(itertools.chain.from_iterable(part.suffixes for part in parts))
    required = _or([part.match for part in parts])
    return _Facts(None, _shortened(prefixes, True), _shortened(suffixes, False), required)


def _cross(left: Strings, right: Strings) -> Strings | None:
    """Each of `left` followed by each of `right`; None if they are too many."""
    if len(left) * len(right) > _MOST_STRINGS:
        return None
    return frozenset(a + b for a in left for b in right)


def _shortened(strings: Strings, beginnings: bool) -> Strings:
    """The strings cut to what may still join with a neighbour; nothing known if they are too many."""
    cut = frozenset(text[:_END_BYTES] if beginnings else text[-_END_BYTES:] for text in strings)
    return cut if 0 < len(cut) <= _MOST_STRINGS else _NOTHING


def _any_of(texts: Strings) -> Required:
    """One of these texts occurs. Nothing is required if one of them is too short to be looked up."""
    if not texts or any(len(text) < SHORTEST_BYTES for text in texts):
        return ANYTHING
    shortest = [text for text in texts if not any(other != text and other in text for other in texts)]
    return _or([Literal(text) for text in sorted(shortest)])


def _and(parts: Iterable[Required]) -> Required:
    """All of `parts`, flat, without repetition or what another one holds already."""
    flat: dict[Required, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, And) else (part,)))
    texts = [part.text for part in flat if isinstance(part, Literal)]
    kept = [
        part
        for part in flat
        if not isinstance(part, Literal) or not any(part.text != text and part.text in text for text in texts)
    ]
    return kept[0] if len(kept) == 1 else And(tuple(kept[:_MOST_PARTS]))


def _or(parts: Iterable[Required]) -> Required:
    flat: dict[Required, None] = {}
    for part in parts:
        if part == ANYTHING:
            return ANYTHING
        flat.update(dict.fromkeys(part.parts if isinstance(part, Or) else (part,)))
    kept = list(flat)
    return kept[0] if len(kept) == 1 else Or(tuple(kept))
