"""Seeded search patterns of the kinds that people and agents write, drawn from the text of a tree."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from etude.agent.index.grep import GrepQuery

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{4,40}")
_WORD = re.compile(r"[A-Za-z]{2,12}")
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")
_BROAD = (
    r"\w+",
    "^$",
    "e",
    "if",
    r"^\s*return",
    r"[0-9]{2}",
    "the",
    r"\bin\b",
    "[A-Z][a-z]+",
    r"\)$",
    "",
    r"x?y",
    "a|o",
)


class PatternMaker:
    """Draws queries; the same seed and the same lines give the same queries."""

    def __init__(self, lines: Sequence[str], seed: int) -> None:
        self._lines = [line for line in lines if len(line) < 400 and _IDENTIFIER.search(line)]
        self._rng = random.Random(seed)

    def selective(self) -> GrepQuery:
        """A query that should match in few files."""
        kinds = (
            self.identifier,
            self.phrase,
            self.alternation,
            self.char_class,
            self.anchored,
            self.ignoring_case,
            self.whole_word,
            self.fixed,
            self.gap,
            self.repeated,
        )
        return self._rng.choice(kinds)()

    def broad(self) -> GrepQuery:
        """A query for which the index can exclude few or no files."""
        rng = self._rng
        if rng.random() < 0.5:
            return GrepQuery(rng.choice(_BROAD), ignore_case=rng.random() < 0.3)
        words = _WORD.findall(self._line())
        word = rng.choice(words) if words else "of"
        if rng.random() < 0.5:
            return GrepQuery(
                word[: rng.randint(1, 3)], ignore_case=rng.random() < 0.5, word=rng.random() < 0.3
            )
        return GrepQuery(rf"{word[0]}\w*{word[-1]}\b")

    def identifier(self) -> GrepQuery:
        """A name, unchanged."""
        return GrepQuery(self._name())

    def phrase(self) -> GrepQuery:
        """Some adjacent words of a line, as a regular expression."""
        return GrepQuery(escape(self._stretch()))

    def fixed(self) -> GrepQuery:
        """Some adjacent words of a line, as a fixed string."""
        return GrepQuery(self._stretch(), fixed=True, ignore_case=self._rng.random() < 0.3)

    def alternation(self) -> GrepQuery:
        """One of several names, sometimes with a prefix or suffix."""
        names = [self._name() for _ in range(self._rng.randint(2, 4))]
        before, behind = self._rng.choice(
            [("", ""), ("", r"\("), (r"\b", r"\b"), ("self\\.", ""), ("(?:", ")+")]
        )
        return GrepQuery(f"{before}({'|'.join(names)}){behind}")

    def char_class(self) -> GrepQuery:
        """A name with a character class in place of one character."""
        name = self._name()
        at = self._rng.randrange(len(name))
        some = self._rng.choice(
            ["[a-z]", "[a-z_]", "[^ ]", f"[{name[at]}x]", r"\w", ".", f"[{name[at]}]?", "[A-Z]"]
        )
        return GrepQuery(name[:at] + some + name[at + 1 :])

    def anchored(self) -> GrepQuery:
        """The beginning or the end of a line."""
        line = self._line().rstrip()
        if self._rng.random() < 0.5:
            return GrepQuery("^" + escape(line[: self._rng.randint(8, 30)]))
        return GrepQuery(escape(line[-self._rng.randint(8, 30) :]) + "$")

    def ignoring_case(self) -> GrepQuery:
        """A name in a different case, matched case-insensitively."""
        name = self._rng.choice([str.upper, str.lower, str.title])(self._name())
        if self._rng.random() < 0.3:
            return GrepQuery(f"(?i){name}")
        return GrepQuery(name, ignore_case=True)

    def whole_word(self) -> GrepQuery:
        """A name as a whole word."""
        return GrepQuery(self._name(), word=True)

    def gap(self) -> GrepQuery:
        """Two names of a line with anything between."""
        names = _IDENTIFIER.findall(self._line())
        between = self._rng.choice([".*", r"\s*=\s*", ".{0,20}", r"\W+"])
        return GrepQuery(names[0] + between + names[-1])

    def repeated(self) -> GrepQuery:
        """A name with a repeated part."""
        name = self._name()
        at = self._rng.randrange(1, len(name))
        count = self._rng.choice(["+", "*", "?", "{2}", "{1,3}", "{0,1}", "+?"])
        return GrepQuery(f"{name[:at]}(?:{name[at:]}){count}")

    def _line(self) -> str:
        return self._rng.choice(self._lines)

    def _name(self) -> str:
        return self._rng.choice(_IDENTIFIER.findall(self._line()))

    def _stretch(self) -> str:
        line = self._line().strip()
        start = self._rng.randrange(max(1, len(line) - 12))
        return line[start : start + self._rng.randint(10, 30)].strip() or self._name()


def escape(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return _SPECIAL.sub(r"\\\1", text)
