""".dockerignore: which files of a build context are left out.

Later patterns win; `!` takes files back in; `**` stands for any number of directories; what matches a
directory holds for all below it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from functools import lru_cache

from etude.sandbox.errors import TemplateError

MAX_PATTERNS = 1000
_MAX_PATTERN_CHARS = 1024


class IgnoreRules:
    """The patterns of one file."""

    def __init__(self, text: str = "", name: str = ".dockerignore") -> None:
        self._rules: list[tuple[bool, tuple[str, ...]]] = []
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
            pattern = line.strip()
            if not pattern or line.startswith("#"):
                continue
            kept = pattern.startswith("!")
            parts = _parts(pattern[kept:].strip())
            if len(pattern) > _MAX_PATTERN_CHARS or len(self._rules) >= MAX_PATTERNS or ".." in parts:
                raise TemplateError(
                    "too long, too many, or leads out of the context",
                    field=f"{name}, line {number}", received=pattern[:80], fix="simplify the pattern",
                )  # fmt: skip
            if parts:
                self._rules.append((kept, parts))

    @property
    def has_exceptions(self) -> bool:
        """Whether files below an ignored directory may be taken back in."""
        return any(kept for kept, _ in self._rules)

    def ignores(self, path: str) -> bool:
        """Whether a context-relative path is left out."""
        parts = tuple(path.split("/"))
        ignored = False
        for kept, pattern in self._rules:
            if ignored == kept and matches_prefix(pattern, parts):
                ignored = not kept
        return ignored


def matches_prefix(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a pattern matches a path or a directory above it. Takes len(pattern) * len(parts) steps."""
    places = {0}
    for depth in range(len(parts) + 1):
        places = _skip_stars(pattern, places)
        if len(pattern) in places and depth:
            return True
        if depth == len(parts):
            return False
        places = {
            place if pattern[place] == "**" else place + 1
            for place in places
            if place < len(pattern) and (pattern[place] == "**" or match_part(pattern[place], parts[depth]))
        }
    return False


def match_part(pattern: str, part: str) -> bool:
    """Whether one component matches: `*`, `?`, `[a-z]`, `[^a]`."""
    return _compiled(pattern).match(part) is not None


def has_wildcard(pattern: str) -> bool:
    """Whether a component is more than a name."""
    return any(char in pattern for char in "*?[")


def _parts(pattern: str) -> tuple[str, ...]:
    return tuple(part for part in pattern.split("/") if part not in ("", "."))


def _skip_stars(pattern: Sequence[str], places: set[int]) -> set[int]:
    """Places reachable where `**` stands for no directory at all."""
    reached = set(places)
    for place in sorted(places):
        while place < len(pattern) and pattern[place] == "**":
            place += 1
            reached.add(place)
    return reached


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    translated = fnmatch.translate(re.sub(r"\[\^", "[!", pattern))
    return re.compile(translated)
