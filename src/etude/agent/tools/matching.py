"""Locates the text that an edit refers to in a file.

Four stages, each tried only if the one before found nothing:

    exact            the text as given (in a file whose lines end with CRLF, its line ends as well)
    trailing blanks  whole lines, apart from blanks at their ends
    indentation      whole lines, apart from blanks at both ends; the new text is indented as the file is
    look-alikes      as given or as before, where quotes, dashes, blanks of one kind count as one (NFKC)

A stage that finds more than one place ends the search as well: the text is ambiguous.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate

from etude.agent.tools.text_file import line_end

_MAX_PLACES = 100
_BLANKS = " \t\r\f\v"
_LOOK_ALIKES = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", None),
    }
)
_WORD = re.compile(r"\w+")
_NEAR_CHARACTERS = 400
_NEAR_LINES = 12
_NEAR_CANDIDATES = 5
_LIKELY = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """A match: the characters `start` to `end`, and the text that replaces them."""

    start: int
    end: int
    new: str


@dataclass(frozen=True, slots=True)
class Found:
    """All places of the first stage that found any."""

    stage: str
    places: tuple[Place, ...]
    """In order; overlapping places are separate places."""


def find_places(content: str, old: str, new: str, strict: bool = False) -> Found:
    """The places of `old` in `content`, with their replacements: 100 at most.

    `strict`: the exact stage only.
    """
    old, new = with_line_ends(content, old, new)
    starts = _positions(content, old)
    if starts or strict:
        return Found("exact", tuple(Place(start, start + len(old), new) for start in starts))
    for stage, key in _STAGES:
        places = _line_places(content, old, new, key, indented=stage != "trailing blanks")
        if places:
            return Found(stage, places)
        if stage == "indentation" and (places := _alike_places(content, old, new)):
            return Found("look-alikes", places)
    return Found("none", ())


def line_of(content: str, position: int) -> int:
    """The line number, from 1, of a character position."""
    return content.count("\n", 0, position) + 1


def with_line_ends(content: str, *texts: str) -> tuple[str, ...]:
    """The texts with the line ends that all lines of the content have."""
    if line_end(content) == "\n":
        return texts
    return tuple(text.replace("\r\n", "\n").replace("\n", "\r\n") for text in texts)


def _positions(text: str, part: str) -> list[int]:
    positions: list[int] = []
    at = text.find(part)
    while at >= 0 and len(positions) < _MAX_PLACES:
        positions.append(at)
        at = text.find(part, at + 1)
    return positions


def _look_alike(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFKC", text.translate(_LOOK_ALIKES))


def _alike_places(content: str, old: str, new: str) -> tuple[Place, ...]:
    """Places, possibly within lines, where each character looks like that of `old`."""
    if content.isascii():
        starts = range(len(content) + 1)
        alike = content
    else:
        pieces = [_look_alike(character) for character in content]
        alike = "".join(pieces)
        # For each character of `alike`, the index of its origin in the content.
        starts = [place for place, piece in enumerate(pieces) for _ in piece]
        starts.append(len(content))
    wanted = _look_alike(old)
    if not wanted.strip():
        return ()
    places: list[Place] = []
    for at in _positions(alike, wanted):
        end = at + len(wanted)
        # Not part of a character that expands to several, such as a dot of an ellipsis.
        if (at == 0 or starts[at - 1] < starts[at]) and starts[end - 1] < starts[end]:
            places.append(Place(starts[at], starts[end], new))
    return tuple(places)


_STAGES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("trailing blanks", lambda line: line.rstrip(_BLANKS)),
    ("indentation", lambda line: line.strip(_BLANKS)),
    ("look-alikes", lambda line: _look_alike(line).strip()),
)


def _line_places(
    content: str, old: str, new: str, key: Callable[[str], str], indented: bool
) -> tuple[Place, ...]:
    """Places where whole lines have the same keys as the lines of `old`."""
    closed = old.endswith("\n")
    wanted = old.removesuffix("\n").split("\n")
    keys = [key(line) for line in wanted]
    if not any(keys):
        return ()
    lines = content.split("\n")
    # Searched as one string: string search is linear whatever the lines are.
    joined = "\n" + "\n".join(map(key, lines)) + "\n"
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    places: list[Place] = []
    for at in _positions(joined, "\n" + "\n".join(keys) + "\n"):
        first = joined.count("\n", 0, at)
        last = first + len(keys) - 1
        end = starts[last] + len(lines[last])
        if closed and last + 1 < len(lines):
            end += 1
        elif not closed and lines[last].endswith("\r"):
            end -= 1
        written = _indented(new, wanted, lines[first : last + 1]) if indented else new
        places.append(Place(starts[first], end, written))
    return tuple(places)


def _indented(new: str, wanted: list[str], present: list[str]) -> str:
    """The new text, shifted by the difference in indentation between the file's first line and `wanted`'s."""
    first = next(number for number, line in enumerate(wanted) if line.strip(_BLANKS))
    asked, there = _indentation(wanted[first]), _indentation(present[first])
    if asked == there:
        return new
    return "\n".join(_shifted(line, asked, there) for line in new.split("\n"))


def _shifted(line: str, asked: str, there: str) -> str:
    if not line.strip():
        return line
    if line.startswith(asked):
        return there + line[len(asked) :]
    # Less indented than the first line: the difference still applies if it consists of blanks.
    if there.endswith(asked):
        return there[: len(there) - len(asked)] + line
    surplus = asked[: len(asked) - len(there)] if asked.endswith(there) else ""
    return line.removeprefix(surplus) if line.startswith(surplus) else line.lstrip(_BLANKS)


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def nearest(content: str, old: str) -> tuple[int, list[str]] | None:
    """(first line from 1, lines) of the part of a file most like `old`; None if nothing is like it.

    Compares words first, and characters only of the parts that share most of them, so that it takes time
    linear in the file.
    """
    lines = [line[:_NEAR_CHARACTERS] for line in content.split("\n")]
    wanted = [line[:_NEAR_CHARACTERS] for line in old.strip("\n").split("\n")[:_NEAR_LINES]]
    words = Counter(word for line in wanted for word in _WORD.findall(line))
    if not words:
        return None
    common = [sum(min(words[w], n) for w, n in _counted(line, words).items()) for line in lines]
    height = len(wanted)
    sums: list[tuple[int, int]] = []
    window = sum(common[:height])
    for start in range(max(len(lines) - height + 1, 1)):
        sums.append((window, -start))
        window += (common[start + height] if start + height < len(lines) else 0) - common[start]
    best: tuple[float, int] | None = None
    for _, negative in sorted(sums, reverse=True)[:_NEAR_CANDIDATES]:
        ratio = _likeness(wanted, lines[-negative : -negative + height])
        if ratio >= _LIKELY and (best is None or ratio > best[0]):
            best = (ratio, -negative)
    if best is None:
        return None
    return best[1] + 1, lines[best[1] : best[1] + height]


def _counted(line: str, words: Counter[str]) -> Counter[str]:
    return Counter(word for word in _WORD.findall(line) if word in words)


def _likeness(wanted: list[str], present: list[str]) -> float:
    first, second = ("\n".join(line.strip() for line in lines)[:2000] for lines in (wanted, present))
    return SequenceMatcher(None, first, second, autojunk=False).ratio()
