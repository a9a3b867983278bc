"""Which paths a search is confined to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from etude.errors import ToolArgumentError

__all__ = ["path_filter"]

_WILD = re.compile(r"[*?\[]")


def path_filter(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path is wanted: it matches one pattern at least, and none that starts with "!".

    Raises `ToolArgumentError` for a pattern that makes no sense.

    `src/app` is this file or all below this folder; `*.py`, without a slash, a name anywhere;
    `src/**/test_*.py` a whole path, where `*` stops at a slash and `**` does not. With excluding patterns
    alone all others are wanted.
    """
    wanted = [_matcher(pattern) for pattern in patterns if not pattern.startswith("!")]
    unwanted = [_matcher(pattern[1:]) for pattern in patterns if pattern.startswith("!")]

    def test(path: str) -> bool:
        return (not wanted or any(match(path) for match in wanted)) and not any(
            match(path) for match in unwanted
        )

    return test


def _matcher(pattern: str) -> Callable[[str], bool]:
    pattern = pattern.removeprefix("./").strip("/")
    if pattern in ("", "."):
        return lambda _: True
    if not _WILD.search(pattern):
        return lambda path: path == pattern or path.startswith(pattern + "/")
    try:
        matches = re.compile(_expression(pattern), re.DOTALL).fullmatch
    except re.error as error:
        raise ToolArgumentError(f"no path pattern: {error}", field="paths", received=pattern) from error
    if "/" in pattern:
        return lambda path: matches(path) is not None
    return lambda path: matches(path.rpartition("/")[2]) is not None


def _expression(pattern: str) -> str:
    """A glob as a regular expression; an unclosed bracket stands for itself."""
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            parts.append("(?:.*/)?")
            at += 3
        elif rest.startswith("**"):
            parts.append(".*")
            at += 2
        elif (bracket := re.match(r"\[([!^]?)(\]?[^\]/]*)\]", rest)) and bracket[2]:
            parts.append(f"[{'^' if bracket[1] else ''}{_escaped(bracket[2])}]")
            at += bracket.end()
        else:
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(rest[0], re.escape(rest[0])))
            at += 1
    return "".join(parts)


def _escaped(members: str) -> str:
    return re.sub(r"([\\\]\[^&~|])", r"\\\1", members)
