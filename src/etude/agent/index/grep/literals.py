"""Derives from a regular expression the literals that a matching file must hold: an AND of ORs.

Python's own parser reads the pattern. Syntax that Rust's `regex`, which ripgrep uses, reads differently is
rejected before (`_DIFFERENT`) or by Python: then nothing is required, and ripgrep searches the whole tree.

After Russ Cox ("Regular Expression Matching with a Trigram Index", 2012): for each part of the expression,
the possible prefixes of its matches, if they are few, and the literals that must occur anywhere inside. Every
step may only weaken the requirement: a file that matches is never excluded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from re import _parser as python_parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from etude.agent.index.grep.query import GrepQuery

SHORTEST_BYTES = 3
_MOST_STRINGS = 24
_LARGEST_CLASS = 8
_LONGEST_BYTES = 256
_MOST_PARTS = 16
_MOST_COPIES = 4
_LONGEST_PATTERN = 4_000
"""Longer ones are not analysed: that would take longer than ripgrep's search."""
_ODD_FOLDS = frozenset("ksKS")
"""Letters to which two non-ASCII characters fold by case: the Kelvin sign and the long s."""
_ESCAPE = re.compile(r"\\(?:([<>]|[bB]\{)|.)", re.DOTALL)
_DIFFERENT = re.compile(r"\[\^?\]|\[[^\]]*(?:\[|&&|--|~~|\|\|)|\{[^}]*\s")
"""With escapes taken out: a class that begins with its end, classes within classes and operations on them,
spaces in a count."""
_KNOWN_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.UNICODE


class Unsure(Exception):
    """A pattern has syntax that the index does not analyse."""


Texts = frozenset[bytes]
"""Alternatives: one of these occurs in a file whose ASCII letters are lower-cased."""
_NOTHING: Texts = frozenset([b""])


@dataclass(frozen=True, slots=True)
class Plan:
    """The index lookup for one query."""

    required: tuple[Texts, ...] = ()
    """All of these must occur; empty: no requirement."""
    odd_folds: bool = False
    """Files that hold the Kelvin sign or the long s must be candidates whatever `required` says."""


def plan(query: GrepQuery) -> Plan:
    """The literals that a file must hold for `query` to match in it; no requirement where in doubt."""
    if len(query.pattern) > _LONGEST_PATTERN:
        return Plan()
    analysis = _Analysis()
    try:
        parsed = _parse(re.escape(query.pattern) if query.fixed else query.pattern)
        folds = query.ignore_case or bool(parsed.state.flags & re.IGNORECASE)
        facts = analysis.sequence(parsed, folds)
    except (Unsure, re.error, RecursionError, OverflowError, UnicodeEncodeError):
        return Plan()
    return Plan(_without_repetition(facts.found), analysis.odd_folds)


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


@dataclass(frozen=True, slots=True)
class _Facts:
    """Properties of the texts that one part of a pattern matches."""

    starts: Texts = _NOTHING
    """Each text begins with one of these."""
    is_whole: bool = False
    """Whether each text equals one of `starts`."""
    required: tuple[Texts, ...] = ()
    """Further literals that occur in the file around each text."""

    @property
    def found(self) -> list[Texts]:
        """All requirements that are long enough to look up."""
        return list(filter(_is_long, (*self.required, self.starts)))


_EMPTY = _Facts(is_whole=True)


@dataclass(slots=True)
class _Analysis:
    """One walk over a tree of Python's parser: lists of (operation, argument)."""

    odd_folds: bool = False

    def sequence(self, parts: Iterable[tuple[Any, Any]], folds: bool) -> _Facts:
        return _joined(self.part(operation.name, argument, folds) for operation, argument in parts)

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
        """A single character out of `codes`; None: out of too many to list."""
        if codes is None or (folds and max(codes) > 127):
            return _Facts()
        chars = {chr(code) for code in codes}
        if not chars.isdisjoint("\n\0"):
            raise Unsure("line feed or NUL")
        self.odd_folds |= folds and not chars.isdisjoint(_ODD_FOLDS)
        texts = frozenset(char.encode("utf-8", "surrogateescape").lower() for char in chars)
        return _Facts(texts, is_whole=True)


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
    copies = min(least, _MOST_COPIES)
    facts = _joined([part] * copies)
    return facts if copies == least == most else replace(facts, is_whole=False)


def _joined(parts: Iterable[_Facts]) -> _Facts:
    """Properties of the concatenation of `parts`."""
    starts: Texts | None = None  # set once the texts are longer than their starts
    before, required = _NOTHING, list[Texts]()  # `before`: literals directly before the next part
    for part in parts:
        joined = _cross(before, part.starts)
        if joined is None:
            starts, joined = starts or before, part.starts
            required.append(before)
        required += part.required
        before = joined
        if not part.is_whole:
            starts, before = starts or joined, _NOTHING
            required.append(joined)
        required = list(filter(_is_long, required))
        if len(required) >= _MOST_PARTS:  # selective enough
            starts = starts or before
            break
    return _Facts(
        starts or before, starts is None, tuple(required) if starts is None else (*required, before)
    )


def _alternation(branches: list[_Facts]) -> _Facts:
    starts = frozenset[bytes]().union(*(branch.starts for branch in branches))
    is_few = len(starts) <= _MOST_STRINGS
    is_whole = is_few and all(branch.is_whole for branch in branches)
    if is_whole and not any(branch.required for branch in branches):
        return _Facts(starts, is_whole)
    best = [
        max(branch.found, key=lambda texts: min(map(len, texts)), default=_NOTHING) for branch in branches
    ]
    either = frozenset[bytes]().union(*best)
    return _Facts(starts if is_few else _NOTHING, is_whole, (either,))


def _cross(left: Texts, right: Texts) -> Texts | None:
    """Each of `left` followed by each of `right`; None if they are too many, or too long."""
    if len(left) * len(right) > _MOST_STRINGS or max(map(len, left)) + max(map(len, right)) > _LONGEST_BYTES:
        return None
    return frozenset(a + b for a in left for b in right)


def _is_long(texts: Texts) -> bool:
    """Whether all are long enough to look up."""
    return all(len(text) >= SHORTEST_BYTES for text in texts)


def _without_repetition(found: Iterable[Texts]) -> tuple[Texts, ...]:
    """The requirements without those that others imply."""
    kept: list[Texts] = []
    for texts in list(found)[:_MOST_PARTS]:
        shortest = frozenset(a for a in texts if not any(a != b and b in a for b in texts))
        if not any(_holds(other, shortest) for other in kept):
            kept = [*(other for other in kept if not _holds(shortest, other)), shortest]
    return tuple(kept)


def _holds(texts: Texts, others: Texts) -> bool:
    """Whether a file with one of `texts` has one of `others`."""
    return all(any(other in text for other in others) for text in texts)
