import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools.values import flag, json_value, lines_of, words_of
from etude.errors import ToolArgumentError

plain = st.text("abc/._:", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), (" YES ", True), ("1", True), ("false", False), ("no", False), ("", False)],
)
def test_flags_are_read_from_words(text, value):
    assert flag({"x": text}, "x") is value


def test_a_flag_that_is_missing_is_no_and_anything_else_is_refused():
    assert flag({}, "x") is False
    with pytest.raises(ToolArgumentError, match="x must be true or false"):
        flag({"x": "perhaps" * 100}, "x")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.py b.py\nc.py", ["a.py", "b.py", "c.py"]),
        ("a.py::test_x[1 2] b", ["a.py::test_x[1 2]", "b"]),
        ('["a b", "c"]', ["a b", "c"]),
        ("[]", []),
        ("[x] y", ["[x]", "y"]),
        ("a[ b", ["a", "[", "b"]),
        (" ", []),
    ],
)
def test_words_come_from_blanks_or_json(text, words):
    assert words_of({"x": text}, "x", 9) == words


@given(st.lists(plain, max_size=5))
def test_lists_come_back_however_they_are_written(entries):
    for text in (json.dumps(entries), "\n".join(entries)):
        assert lines_of({"x": text}, "x", 9) == words_of({"x": text}, "x", 9) == entries


@given(st.text(max_size=40))
def test_any_text_is_a_list_or_refused(text):
    for read in (lines_of, words_of):
        try:
            entries = read({"x": text}, "x", 5)
        except ToolArgumentError:
            continue
        assert len(entries) <= 5 and all(entry.strip() == entry and entry for entry in entries)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '"' + "x" * (2 << 20) + '"'])
def test_what_is_no_json_is_refused_in_few_words(text):
    with pytest.raises(ToolArgumentError) as caught:
        json_value({"x": text}, "x")
    assert len(caught.value.message) < 120
