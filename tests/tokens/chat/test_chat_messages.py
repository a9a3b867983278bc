"""Messages are distinguished by their content, whatever its format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.tokens.chat.messages import Answer, Call, canonical, content_key

finite = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=16,
)


@given(arguments=st.dictionaries(st.text(), finite, max_size=4))
def test_arguments_that_are_serialised_again_have_the_same_key(arguments: dict[str, Any]) -> None:
    again = json.loads(json.dumps(dict(reversed(arguments.items())), indent=2, ensure_ascii=False))
    one, other = (Answer("x", (Call("1", "f", value),)) for value in (arguments, again))
    assert content_key(one) == content_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [({"a": 1}, {"a": True}), ({"a": 1}, {"a": "1"}), ({"a": [1, 2]}, {"a": [2, 1]}), ({}, {"a": None})],
)
def test_other_arguments_have_another_key(one: Any, other: Any) -> None:
    assert canonical(one) != canonical(other)


def test_neighbouring_fields_never_run_into_each_other() -> None:
    one = Answer("", (Call("", "f", {}), Call("", "g", {})))
    assert content_key(one) != content_key(Answer("", (Call("", "f", {"g": {}}),)))
    assert content_key(Answer("ab")) != content_key(Answer("a b"))
