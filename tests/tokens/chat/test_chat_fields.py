"""Clients' tool definitions and request bodies: accepted, or refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.tokens.chat.client_tools import client_tool
from etude.tokens.chat.dialects import DIALECTS
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.fields import parse_body

WORDS = [
    "type",
    "string",
    "object",
    "array",
    "properties",
    "parameters",
    "required",
    "anyOf",
    "enum",
    "items",
]
WORDS += ["name", "description", "function", "{}", "[1]"]

words = st.sampled_from(WORDS)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=5),
    max_leaves=24,
)


@given(schema=values)
def test_any_tool_schema_is_taken_or_refused(schema: Any) -> None:
    try:
        tool = client_tool("t", None, schema, "tools[0]")
    except BadRequestError:
        return
    assert tool.function_schema()["function"]["parameters"] is not None  # type: ignore[index]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": ["null", "integer"]}, "integer"),
        ({"anyOf": [{"type": ["null", "integer"]}, {"type": "string"}]}, "integer"),
        ({"oneOf": [{"type": "null"}, {"type": ["array", "null"]}]}, "array"),
        ({"type": {"a": 1}}, "string"),
        ({"type": [["integer"], "boolean"]}, "boolean"),
    ],
)
def test_a_parameter_is_of_the_first_type_that_we_know(schema: Any, kind: str) -> None:
    (parameter,) = client_tool("t", None, {"properties": {"p": schema}}, "tools[0]").parameters
    assert parameter.kind == kind


def test_a_body_that_nests_too_deep_is_refused() -> None:
    deep = "[" * 900 + "]" * 900
    with pytest.raises(UserError, match="deep"):
        parse_body(f'{{"tools": {deep}}}'.encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"[" * 200_000, b'{"a":' * 200_000, b"\xff"])
def test_a_body_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(UserError):
        parse_body(data)


ASKED = {
    "messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
}
TOOL = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("dialect", "more", "field", "passes"),
    [
        ("messages", {"output_config": {"other": "high"}}, "output_config.other", True),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format", False),
        ("messages", {"stream_options": {"include_usage": True}}, "stream_options", True),
        ("responses", {"text": {"other": "low"}}, "text.other", True),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format", False),
        ("responses", {"reasoning": {"other": "auto"}}, "reasoning.other", True),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name_and_passed_over_for_agents_where_it_may_be(
    dialect: str, more: dict[str, Any], field: str, passes: bool
) -> None:
    read = next(one.read for one in DIALECTS if one.name == dialect)
    body = {**ASKED[dialect], **more}
    with pytest.raises(BadRequestError) as caught:
        read(body)
    assert caught.value.field == field
    if passes:
        assert read(body, "", strict=False)
    else:
        with pytest.raises(BadRequestError, match="not supported"):
            read(body, "", strict=False)


def test_options_that_ask_for_nothing_are_taken() -> None:
    read = next(one.read for one in DIALECTS if one.name == "responses")
    neutral = {"text": {"format": {"type": "text"}, "verbosity": None}, "reasoning": {"effort": None}}
    assert read({**ASKED["responses"], **neutral})
