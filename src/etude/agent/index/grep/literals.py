"""From a regular expression to what a matching file must hold: literals joined by AND and OR.

The method is Russ Cox' ("Regular Expression Matching with a Trigram Index", 2012): for each part of the
expression the strings that it matches exactly if they are few, else how it can begin and end, and what must
occur anywhere inside. Here the leaves are whole literals; which grams of a literal are looked up is decided
against the index. Every step may only weaken: a file that matches is never excluded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.agent.index.grep.query import GrepQuery
from etude.agent.index.grep.syntax import (
    Alternation,
    AnyText,
    Char,
    Concat,
    Empty,
    Node,
    OneOf,
    Repeat,
    Unsure,
    parse,
)

__all__ = ["ANYTHING", "And", "Literal", "Or", "Plan", "Required", "plan"]

SHORTEST_BYTES = 3
_MOST_STRINGS = 24
_LONGEST_BYTES = 256
_END_BYTES = 24
_MOST_PARTS = 16
_LONGEST_PATTERN = 4_000
"""Of a longer one nothing is known: looking for its literals would take longer than ripgrep does."""
_ODD_FOLDS = frozenset("ksKS")
"""Letters that two characters outside ASCII equal but for case: the Kelvin sign and the long s."""


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
    odd_folds: bool
    """Files that hold the Kelvin sign or the long s must be candidates whatever `required` says."""


def plan(query: GrepQuery) -> Plan:
    """What a file must hold so that `query` can match in it. `ANYTHING` where in doubt."""
    if len(query.pattern) > _LONGEST_PATTERN:
        return Plan(ANYTHING, False)
    if query.fixed:
        if "\n" in query.pattern:
            return Plan(ANYTHING, False)
        tree: Node = Concat(tuple(Char(char, query.ignore_case) for char in query.pattern[:_LONGEST_BYTES]))
    else:
        try:
            tree = parse(query.pattern, ignore_case=query.ignore_case)
        except Unsure:
            return Plan(ANYTHING, False)
    analysis = _Analysis()
    facts = analysis.facts(tree)
    return Plan(
        _and([facts.match, *([_any_of(facts.exact)] if facts.exact is not None else [])]), analysis.odd_folds
    )


Strings = frozenset[bytes]
_NOTHING: Strings = frozenset([b""])


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of the text that one node matches."""

    exact: Strings | None = None
    """All texts that it can match, if they are few."""
    prefixes: Strings = _NOTHING
    """Each text begins with one of these."""
    suffixes: Strings = _NOTHING
    match: Required = field(default=ANYTHING)
    """Holds in the file around each text."""


@dataclass(slots=True)
class _Analysis:
    """One walk over a tree."""

    odd_folds: bool = False

    def facts(self, node: Node) -> _Facts:
        match node:
            case Empty():
                return _Facts(exact=_NOTHING)
            case AnyText():
                return _Facts()
            case Char():
                return self.one_of((node,))
            case OneOf(chars):
                return self.one_of(chars)
            case Concat(parts):
                return self.concat([self.facts(part) for part in parts])
            case Alternation(branches):
                return _alternation([self.facts(branch) for branch in branches])
            case Repeat(part, least, exact):
                return self.repeat(self.facts(part), least, exact)

    def one_of(self, chars: Iterable[Char]) -> _Facts:
        texts = [self.text(char) for char in chars]
        known = [text for text in texts if text is not None]
        return _Facts(exact=frozenset(known)) if len(known) == len(texts) else _Facts()

    def text(self, char: Char) -> bytes | None:
        """The character's bytes with ASCII letters in lower case, if that is all it can match."""
        if char.fold and not char.char.isascii():
            return None
        self.odd_folds |= char.fold and char.char in _ODD_FOLDS
        return char.char.encode("utf-8", "surrogateescape").lower()

    def concat(self, parts: list[_Facts]) -> _Facts:
        whole = _Facts(exact=_NOTHING)
        for part in parts:
            whole = _concat(whole, part)
        return whole

    def repeat(self, part: _Facts, least: int, exact: bool) -> _Facts:
        if least == 0:
            return _Facts()
        copies = min(least, 4)
        whole = self.concat([part] * copies)
        return whole if exact and copies == least else _open_ended(whole)


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
    return _Facts(
        None,
        _shortened(prefixes, True),
        _shortened(suffixes, False),
        _or([part.match for part in parts]),
    )


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
    """All of `parts`, flat, without repetition."""
    flat: dict[Required, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, And) else (part,)))
    literals = [part.text for part in flat if isinstance(part, Literal)]
    kept = [
        part
        for part in flat
        if not (
            isinstance(part, Literal) and any(part.text != text and part.text in text for text in literals)
        )
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
