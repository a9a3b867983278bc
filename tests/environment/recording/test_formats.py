"""Whatever a client sends is read, or refused with an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.tokens.chat.dialects import CHAT, DIALECTS, Dialect
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.messages import Answer, content_key

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


@pytest.mark.slow
@given(body=bodies, told=st.none() | messages)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("strict", [True, False])
def test_any_body_is_read_or_refused_by_name(
    dialect: Dialect, strict: bool, body: dict[str, Any], told: list[Any] | None
) -> None:
    if told is not None:
        body = {
            **body,
            "max_tokens": 5,
            **({"input": told} if dialect.name == "responses" else {"messages": told}),
        }
    try:
        request = dialect.read(body, "", strict)
    except BadRequestError as error:
        assert error.field
        return
    for message in request.messages:
        assert content_key(message) == content_key(message)


def test_deep_nesting_is_kept_as_text_in_arguments() -> None:
    deep = "[" * 900 + "]" * 900
    call = {"id": "1", "function": {"name": "f", "arguments": deep}}
    told = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]
    request = CHAT.read({"messages": told})
    answer = request.messages[1]
    assert isinstance(answer, Answer) and answer.calls[0].arguments == deep
    assert content_key(answer)
