"""File patterns as `.gitignore` and ripgrep's `--glob` write them.

    *.py            a pattern without a slash: files of that name at any depth
    lib/*.py        with a slash: the whole path, from the directory where the search begins
    **              any number of directories, none included
    * ? [a-z] [!a]  within one part of the path
    {py,pyi}        alternatives
    \\x              the character x itself

Matching takes time linear in the path for each `**`, whatever the pattern.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from etude.errors import ToolArgumentError

MAX_CHARACTERS = 256
_MAX_ALTERNATIVES = 64

Part = re.Pattern[str] | None
"""One part of a path; None is `**`."""


def compile_glob(pattern: str) -> Callable[[str], bool]:
    """A predicate on paths. Raises ToolArgumentError for a pattern that is empty, too long or unclosed."""
    pattern = pattern.strip().removeprefix("./")
    if not pattern or len(pattern) > MAX_CHARACTERS:
        reason = "pattern too long" if pattern else "pattern is empty"
        raise ToolArgumentError(reason, field="pattern", received=len(pattern))
    alternatives = [_parts(alternative) for alternative in _alternatives(pattern)]
    return lambda path: any(_matches(parts, path.split("/")) for parts in alternatives)


@lru_cache(maxsize=64)
def compile_globs(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """A predicate for paths that fit all patterns; one with a leading `!` must not fit. Raises as
    `compile_glob`."""
    tests = [(compile_glob(glob.removeprefix("!")), not glob.startswith("!")) for glob in patterns]
    return lambda path: all(fits(path) == wanted for fits, wanted in tests)


def compile_path_pattern(pattern: str) -> Callable[[str], bool]:
    """A predicate on whole paths for a simpler syntax: `*` and `?` within one part, `**` for any number of
    parts, nothing else is special."""
    parts: list[Part] = [
        None if part == "**" else re.compile(fnmatch.translate(part.replace("[", "[[]")))
        for part in pattern.split("/")
    ]
    return lambda path: _matches(parts, path.split("/"))


def _alternatives(pattern: str) -> Iterator[str]:
    """The pattern without braces, once for each choice. Raises ToolArgumentError."""
    pending, count = [pattern], 0
    while pending:
        first = pending.pop()
        span = _first_braces(first)
        if span is None:
            count += 1
            yield first
            continue
        start, choices, end = span
        pending += [first[:start] + choice + first[end:] for choice in reversed(choices)]
        if count + len(pending) > _MAX_ALTERNATIVES:
            raise ToolArgumentError(f"more than {_MAX_ALTERNATIVES} alternatives", field="pattern")


def _first_braces(pattern: str) -> tuple[int, list[str], int] | None:
    """(start, alternatives, end) of the first outermost `{a,b}`."""
    start, depth, choices, begin = -1, 0, list[str](), 0
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif character == "[" and (closing := _class_end(pattern, position)) > 0:
            position = closing
        elif character == "{":
            depth += 1
            if depth == 1:
                start, begin = position, position + 1
        elif depth == 1 and character in ",}":
            choices.append(pattern[begin:position])
            begin = position + 1
            if character == "}":
                return start, choices, position + 1
        elif character == "}" and depth:
            depth -= 1
        position += 1
    if depth:
        raise ToolArgumentError("unclosed {", field="pattern", received=pattern)
    return None


def _class_end(pattern: str, start: int) -> int:
    """Index of the `]` that closes the character class opened at `start`; -1 if there is none."""
    first = start + 1 + (pattern[start + 1 : start + 2] in ("!", "^"))
    return pattern.find("]", first + 1)


def _parts(pattern: str) -> list[Part]:
    if "/" not in pattern.rstrip("/"):
        pattern = "**/" + pattern
    if pattern.endswith("/"):
        pattern += "**"
    return [None if part == "**" else _part(part) for part in pattern.strip("/").split("/")]


@lru_cache(maxsize=1024)
def _part(part: str) -> re.Pattern[str]:
    """One part, compiled by `fnmatch`, whose expressions do not backtrack."""
    spelled: list[str] = []
    position = 0
    while position < len(part):
        character = part[position]
        if character == "\\" and position + 1 < len(part):
            position += 1
            spelled.append(f"[{part[position]}]" if part[position] in "*?[" else part[position])
        elif character == "[" and (end := _class_end(part, position)) > 0:
            inside = part[position + 1 : end]
            spelled.append("[" + ("!" + inside[1:] if inside.startswith("^") else inside) + "]")
            position = end
        else:
            spelled.append(character)
        position += 1
    return re.compile(fnmatch.translate("".join(spelled)))


def _matches(parts: list[Part], names: list[str]) -> bool:
    """Whether the parts fit all names. Backtracking to the last `**` is enough: all before it has matched."""
    part = name = 0
    retry: tuple[int, int] | None = None
    while name < len(names):
        if part < len(parts):
            expected = parts[part]
            if expected is None:
                retry = (part, name)
                part += 1
                continue
            if expected.match(names[name]):
                part, name = part + 1, name + 1
                continue
        if retry is None:
            return False
        retry = (retry[0], retry[1] + 1)
        part, name = retry[0] + 1, retry[1]
    return part == len(parts)
