"""Splits code and questions about code into the words that BM25 counts.

`parseHttpHeader`, `parse_http_header` and "parsing HTTP headers" have to meet, so identifiers are split where
their author joined words, case is dropped, and plural and verb endings are cut (`stem`).
"""

from __future__ import annotations

import re

_RUN = re.compile(r"[^\W_]+")
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+|[^\x00-\x7f]+")
_LONGEST = 40
"""Characters of one word; longer ones are hashes and encoded data."""
_VOWELS = frozenset("aeiouy")
_STOP = (
    "a an and any are as at be but by can do does for from has have how if in into is it its no not of on or "
    "self so such that the their then there these this those to was we were what when where which while will "
    "with you"
)
STOP_WORDS = frozenset(_STOP.split())
"""Left out of questions only: in code they cost nothing, as no query contains them."""


def split_words(text: str) -> list[str]:
    """Lower-case words of `text` in order, identifiers split at underscores, case and digits."""
    parts = (part for run in _RUN.findall(text) for part in _PART.findall(run))
    return [part.lower() for part in parts if len(part) <= _LONGEST]


def stem(word: str) -> str:
    """`word` without the commonest English endings.

    Two words of one meaning mostly get one stem; a stem need not be a word. Far less than the classic suffix
    rules: names in code are mostly stems already, and a stem that is cut too far joins words that differ.
    """
    if len(word) < 4 or not word.isascii():
        return word
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith(("sses", "shes", "ches", "xes", "zes")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        rest = word[: -len(ending)]
        if word.endswith(ending) and len(rest) >= 3 and not _VOWELS.isdisjoint(rest):
            word = rest[:-1] if rest[-1] == rest[-2] and rest[-1] not in "lsz" else rest
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def stems(text: str) -> list[str]:
    """The stems of all words of `text`, in order."""
    return [stem(word) for word in split_words(text)]


def question_stems(question: str) -> list[str]:
    """Stems of a question, each once: without stop words, unless it has nothing else."""
    words = split_words(question)
    kept = [word for word in words if word not in STOP_WORDS] or words
    return list(dict.fromkeys(map(stem, kept)))
