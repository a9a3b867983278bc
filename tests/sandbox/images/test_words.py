"""Words and variables of Dockerfile instructions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.words import MAX_VALUE_CHARS, expand, split_words

VARIABLES = {"X": "ex", "EMPTY": "", "SPACED": "a b"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$X", "ex"),
        ("${X}y", "exy"),
        ("$Xy", ""),
        ("$NONE.", "."),
        ("${NONE:-d}", "d"),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY-d}", ""),
        ("${X:+d}", "d"),
        ("${EMPTY:+d}", ""),
        ("${EMPTY+d}", "d"),
        ("${NONE:-${X:-q}z}", "exz"),
        ("${NONE:-'}'}", "}"),
        ("\\$X", "$X"),
        ("'$X'", "$X"),
        ('"$X \\" \\n"', 'ex " \\n'),
        ("$", "$"),
        ("a\\", "a\\"),
        ("$1", "$1"),
    ],
)
def test_expansion(text: str, value: str) -> None:
    assert expand(text, VARIABLES) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("'a b' \"c d\" e\\ f", ["a b", "c d", "e f"]),
        ("k=$SPACED", ["k=a b"]),
        ("''", [""]),
        ("", []),
    ],
)
def test_splitting(text: str, words: list[str]) -> None:
    assert split_words(text, VARIABLES) == words


@pytest.mark.parametrize("text", ["'open", '"open', "${X", "${X:?no}", "${X#a}", "${}", "${X:-" * 30])
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        split_words(text, VARIABLES)


def test_values_do_not_grow_without_bound() -> None:
    value = "x" * (MAX_VALUE_CHARS // 2)
    with pytest.raises(TemplateError, match="too much text"):
        expand('"' + "$V" * 3 + '"', {"V": value})


@given(st.text(alphabet="ab $\"'\\{}:-+X", max_size=60))
def test_any_text_expands_or_is_a_typed_error(text: str) -> None:
    try:
        words = split_words(text, VARIABLES)
    except TemplateError:
        return
    assert sum(map(len, words)) <= len(text) * 4


@given(st.text().filter(lambda text: not set(text) & set("$\"'\\")))
def test_text_without_special_characters_stays(text: str) -> None:
    assert expand(text, {}) == text
