"""Arguments that are not strings are refused, named by their JSON type."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools.registry import check_arguments, json_type
from etude.errors import ToolArgumentError
from etude.tokens.grammar import Parameter, ToolSchema

SCHEMA = ToolSchema(
    "look",
    "Look.",
    (
        Parameter("path", "where"),
        Parameter("limit", "how many", required=False, kind="integer"),
        Parameter("all", "or not", required=False, kind="boolean"),
        Parameter("names", "which", required=False, kind="array"),
    ),
)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("path", 7, "path: expected a string, received an integer"),
        ("path", True, "path: expected a string, received a boolean"),
        ("path", None, "path: expected a string, received null"),
        ("path", {"a": 1}, "path: expected a string, received an object"),
        ("limit", [3], "limit: expected an integer, written as a string, received an array"),
        ("limit", 3.5, "limit: expected an integer, written as a string, received a number"),
        ("all", 1, "all: expected true or false, written as a string, received an integer"),
        ("names", ("a",), "names: expected an array, written as a string, received an array"),
        ("path", b"x", "path: expected a string, received a value that JSON does not have"),
    ],
)
def test_wrong_types_are_named_in_plain_words(name, value, said):
    with pytest.raises(ToolArgumentError) as caught:
        check_arguments(SCHEMA, {"path": "a", name: value})
    assert caught.value.message == said
    assert caught.value.field == name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
)


@given(json_values)
def test_no_word_of_python_is_shown(value):
    assert json_type(value) in (
        "a string", "a boolean", "an integer", "a number", "null", "an array", "an object"
    )  # fmt: skip
