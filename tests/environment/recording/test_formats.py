"""Whatever a client sends is read, or refused with an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environment.recording.anthropic_format import read_messages
from etude.environment.recording.client_tools import client_tool
from etude.environment.recording.errors import BadRequestError
from etude.environment.recording.fields import SamplingDefaults, parse_body
from etude.environment.recording.messages import Answer, Call, canonical, content_key
from etude.environment.recording.openai_format import read_chat

WORDS = [
    "role",
    "content",
    "type",
    "text",
    "user",
    "assistant",
    "tool",
    "system",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
    "auto",
]
WORDS += [
    "tool_call_id",
    "tool_use",
    "tool_result",
    "tool_use_id",
    "input",
    "thinking",
    "{}",
    "[1]",
    "properties",
    "parameters",
]
WORDS += ["input_schema", "required", "anyOf", "stop"]
FIELDS = ["messages", "tools", "system", "stop", "max_tokens", "temperature", "tool_choice", "stream", "seed"]
FIELDS += [
    "n",
    "stream_options",
    "parallel_tool_calls",
    "stop_sequences",
    "top_p",
    "response_format",
    "logprobs",
]

words = st.sampled_from(WORDS)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=5),
    max_leaves=24,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": values},
        optional={"tool_calls": values, "tool_call_id": values, "reasoning_content": values},
    ),
    max_size=4,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)


@settings(max_examples=200, deadline=None)
@given(body=bodies, told=st.none() | messages)
@pytest.mark.parametrize("read", [read_chat, read_messages])
def test_any_body_is_read_or_refused_by_name(
    read: Callable[..., Any], body: dict[str, Any], told: list[Any] | None
) -> None:
    if told is not None:
        body = {**body, "messages": told, "max_tokens": 5}
    try:
        request = read(body, "", SamplingDefaults())
    except BadRequestError as error:
        assert error.field
        return
    for message in request.ask.messages:
        assert content_key(message) == content_key(message)


@settings(max_examples=200, deadline=None)
@given(schema=values)
def test_any_tool_schema_is_taken_or_refused(schema: Any) -> None:
    try:
        tool = client_tool("t", None, schema, "tools[0]")
    except BadRequestError:
        return
    assert tool.function_schema()["function"]["parameters"] is not None  # type: ignore[index]


finite = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=16,
)


@settings(max_examples=200, deadline=None)
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


def test_deep_nesting_is_refused_in_a_body_and_kept_as_text_in_arguments() -> None:
    deep = "[" * 900 + "]" * 900
    with pytest.raises(BadRequestError, match="deep"):
        parse_body(f'{{"tools": {deep}}}'.encode())
    call = {"id": "1", "function": {"name": "f", "arguments": deep}}
    told = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]
    request = read_chat({"messages": told}, "", SamplingDefaults())
    answer = request.ask.messages[1]
    assert isinstance(answer, Answer) and answer.calls[0].arguments == deep
    assert content_key(answer)


@pytest.mark.parametrize("data", [b"", b"[]", b"[" * 200_000, b'{"a":' * 200_000, b"\xff"])
def test_a_body_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_body(data)
