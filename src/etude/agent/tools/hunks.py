"""Applies the hunks of a patch to the text of one file.

A hunk's old lines must occur in the file, consecutively, below those of the hunk before it. They are searched
for at the line that the hunk names (shifted as far as the hunk before it was), then nearest to it. Lines are
compared exactly, then without trailing blanks; kept lines stay as the file has them. Each hunk takes time
linear in the file at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile

from etude.agent.tools.interface import shorten
from etude.agent.tools.patches import Hunk
from etude.agent.tools.text_file import line_end
from etude.errors import ToolArgumentError

_SHOWN = 50
_TRIES = 50


def apply_hunks(content: str, hunks: Sequence[Hunk], path: str) -> tuple[str, int]:
    """(the content after all hunks, in order; the first changed line, from 1, or 0 without hunks).

    Raises ToolArgumentError naming the first hunk that does not fit.
    """
    # Where the old lines hold no carriage returns, those of the file are part of its line ends.
    has_cr = any(text.endswith(("\r", "\r\n")) for hunk in hunks for text in hunk.old)
    crlf = not has_cr and line_end(content) == "\r\n"
    file = _File(content.replace("\r\n", "\n") if crlf else content, path)
    result: list[str] = []
    done, moved, first_line = 0, 0, 0
    for hunk in hunks:
        at = file.place(hunk, done, moved)
        if hunk.start is not None:
            moved = at - _expected(hunk, 0)
        result += file.lines[done:at]
        first_line = first_line or len(result) + 1 + _kept_before(hunk)
        done = at + len(hunk.old)
        result += _written(hunk, file.lines[at:done], crlf)
    result += file.lines[done:]
    # A last line without a newline may no longer be the last.
    text = "".join(line if line.endswith("\n") else line + "\n" for line in result[:-1]) + "".join(
        result[-1:]
    )
    return text.replace("\n", "\r\n") if crlf else text, first_line


class _File:
    """The lines of a file with their newlines; the last may lack it. Only a newline ends a line."""

    def __init__(self, content: str, path: str) -> None:
        self.lines = [line + "\n" for line in content.split("\n")]
        last = self.lines.pop()[:-1]
        if last:
            self.lines.append(last)
        self._path = path

    @cached_property
    def _stripped(self) -> list[str]:
        return [line.rstrip() for line in self.lines]

    def place(self, hunk: Hunk, done: int, moved: int) -> int:
        """Index of the line where the hunk's old lines begin. Raises ToolArgumentError."""
        expected = None if hunk.start is None else max(_expected(hunk, moved), done)
        old = hunk.old
        if not old:
            if expected is None and self.lines:
                raise self._misfit(hunk, "has neither line numbers nor lines to find its place by")
            return min(expected or 0, len(self.lines))
        for lines, wanted in ((self.lines, old), (None, [line.rstrip() for line in old])):
            lines = self._stripped if lines is None else lines
            if expected is not None and lines[expected : expected + len(wanted)] == wanted:
                return expected
            places = _places(lines, wanted)
            below = [place for place in places if place >= done]
            if len(below) == 1:
                return below[0]
            if below:
                return self._nearest(below, expected, hunk)
            if places:
                raise self._misfit(hunk, f"stands at line {places[0] + 1}: order hunks from top to bottom")
        raise self._misfit(hunk, self._difference(old, done if expected is None else expected))

    def _nearest(self, places: list[int], expected: int | None, hunk: Hunk) -> int:
        """The place nearest to the expected one, unless another is about as near."""
        if expected is not None:
            first, second = sorted(places, key=lambda place: abs(place - expected))[:2]
            if 2 * abs(first - expected) <= abs(second - expected):
                return first
        numbers = ", ".join(str(place + 1) for place in places[:8]) + (", ..." if len(places) > 8 else "")
        raise self._misfit(hunk, f"fits at lines {numbers}: give more lines around it")

    def _difference(self, old: list[str], expected: int) -> str:
        """Describes the first line that differs from the hunk, at the place where most of its lines fit."""
        wanted = [line.rstrip() for line in old]
        lines = self._stripped
        places = [place for place, line in enumerate(lines) if line and line == wanted[0]]
        places = sorted(places, key=lambda place: abs(place - expected))[:_TRIES]
        if expected < len(lines):
            places.append(expected)
        if not places:
            return f"is beyond the end: expected {_quoted(old[0])}, the file has {len(lines)} lines"
        fitting = {place: _num_fitting(lines, wanted, place) for place in places}
        place = max(places, key=lambda place: fitting[place])
        fits = fitting[place]
        found = _quoted(lines[place + fits]) if place + fits < len(lines) else "the end of the file"
        return f"does not fit at line {place + fits + 1}: expected {_quoted(old[fits])}, found {found}"

    def _misfit(self, hunk: Hunk, reason: str) -> ToolArgumentError:
        return ToolArgumentError(f"hunk {hunk.number} of {shorten(self._path, 80)} {reason}", field="patch")


def _expected(hunk: Hunk, moved: int) -> int:
    """Index of the hunk's first line by its header."""
    assert hunk.start is not None
    return max(hunk.start - (1 if hunk.old else 0) + moved, 0)


def _kept_before(hunk: Hunk) -> int:
    return next(number for number, (mark, _) in enumerate(hunk.lines) if mark != " ")


def _places(lines: list[str], wanted: list[str]) -> list[int]:
    """Every index at which the wanted lines occur, found in time linear in both (Knuth, Morris, Pratt)."""
    borders = [0] * len(wanted)
    length = 0
    for position in range(1, len(wanted)):
        while length and wanted[position] != wanted[length]:
            length = borders[length - 1]
        length += wanted[position] == wanted[length]
        borders[position] = length
    places: list[int] = []
    length = 0
    for position, line in enumerate(lines):
        while length and (length == len(wanted) or line != wanted[length]):
            length = borders[length - 1]
        length += line == wanted[length]
        if length == len(wanted):
            places.append(position - length + 1)
    return places


def _written(hunk: Hunk, present: list[str], crlf: bool) -> list[str]:
    """The hunk's new lines; kept lines as the file has them. `crlf`: carriage returns are added to all lines
    later, so those that a hunk without old lines brings are removed here."""
    old = iter(present)
    written: list[str] = []
    for mark, text in hunk.lines:
        line = (text.replace("\r\n", "\n") if crlf else text) if mark == "+" else next(old)
        if mark != "-":
            written.append(line)
    return written


def _num_fitting(lines: list[str], wanted: list[str], place: int) -> int:
    """How many of the hunk's first lines match the file from a place on; at most all but one."""
    pairs = zip(lines[place : place + len(wanted)], wanted, strict=False)
    return min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), len(wanted) - 1)


def _quoted(line: str) -> str:
    return '"' + shorten(line.rstrip("\n"), _SHOWN) + '"'
