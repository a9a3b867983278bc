"""Why an answer came out otherwise, where that can be read off it: how long it took, addresses, the clock."""

from __future__ import annotations

import re

from etude.environment.history import Difference

DURATIONS = "durations"
_LONGEST = 1 << 20
"""Characters of an answer beyond which nothing is looked for."""
_VOLATILE: dict[str, re.Pattern[str]] = {
    "addresses": re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"),
    "dates and times": re.compile(
        r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?(?:Z| ?[+-]\d\d:?\d\d\b)?"
        r"|\b\d\d:\d\d:\d\d(?:\.\d{1,9})?\b"
    ),
    "temporary names": re.compile(r"/tmp/[\w.+-]{1,255}"),
    DURATIONS: re.compile(r"\b\d{1,12}(?:\.\d{1,12})? ?(?:ns|us|µs|ms|s|sec|seconds)\b"),
}


def causes_of(difference: Difference) -> tuple[str, ...]:
    """What alone differs, of: addresses, dates and times, temporary names, durations.

    Empty where there is more to it, or where it cannot be told.
    """
    before, now = difference.expected, difference.received
    if (before.error, before.finished) != (now.error, now.finished):
        return ()
    texts = [before.output, now.output]
    if max(map(len, texts)) > _LONGEST:
        return ()
    causes: list[str] = []
    for name, pattern in _VOLATILE.items():
        if pattern.findall(texts[0]) != pattern.findall(texts[1]):
            causes.append(name)
        texts = [pattern.sub(f"<{name}>", text) for text in texts]
    return tuple(causes) if texts[0] == texts[1] else ()
