"""Tokenises code in any text (files that do not parse, documentation, prose), and compares texts by lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

_TOKEN = re.compile(
    r'#[^\n]*|(?:(?<!\w)[rbuf]{1,2})?(?:"""(?s:.*?)"""|' + r"'''(?s:.*?)'''"
    r'|"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)*\')'
    r"|[^\W\d]\w*|\d[\w.]*|\*\*=?|//=?|<<=?|>>=?|[-+*/%@&|^=!<>:]=|->|\S",
    re.IGNORECASE,
)
_STRING = re.compile(r"""^[rbufRBUF]{0,2}(\"\"\"|'''|"|')(.*)\1$""", re.DOTALL)


def code_tokens(text: str) -> list[str]:
    """Names, numbers, operators, and strings with normalised quotes; without comments and blanks."""
    found = (token for token in _TOKEN.findall(text) if not token.startswith("#"))
    return [_STRING.sub(r'"\2"', token) if token[-1] in "\"'" else token for token in found]


def runs(tokens: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    """All n-grams (runs of `length` tokens), in order."""
    return (tuple(tokens[at : at + length]) for at in range(len(tokens) - length + 1))


def changed_lines(before: str, after: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """For each hunk: its line ranges [first, last) in the first and in the second text, counted from 0."""
    old, new = before.split("\n"), after.split("\n")
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle = old[head : len(old) - tail], new[head : len(new) - tail]
    for tag, a, b, c, d in difflib.SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if tag != "equal":
            yield (head + a, head + b), (head + c, head + d)


def changed_text(before: str, after: str) -> tuple[str, str]:
    """The removed and the added lines of a difference."""
    old, new = before.split("\n"), after.split("\n")
    spans = list(changed_lines(before, after))
    removed = "\n".join("\n".join(old[slice(*one)]) for one, _ in spans)
    return removed, "\n".join("\n".join(new[slice(*two)]) for _, two in spans)
