"""Chat completions by the official client, against a real server over a scripted sampler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from etude.records import ToolCall
from etude.tokens.chat.histories import ChatFrames
from tests.environment.recording.recording_builders import (
    OPENAI_TOOLS,
    answer_tokens,
    call_text,
    qwen_tokenizer,
)
from tests.inference.server.serving import (
    MODEL,
    PlayedSampler,
    Served,
    make_state,
    replies,
    serving,
    xml_model,
)

openai = pytest.importorskip("openai", reason="the openai client is not installed")

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a coding agent."},
    {"role": "user", "content": "Fix lib/tally.py."},
]
FIRST = f"<think>\nlook\n</think>\n\nI read é.\n{call_text('a.py', 3)}\n{call_text('b.py')}"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(make_state(PlayedSampler(lambda context: ""))) as running:
        yield running


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    """The server, as after its start."""
    sampler = server.state.sampler
    assert isinstance(sampler, PlayedSampler)
    sampler.reset(replies([FIRST, "Done.", "More.", "And more."]))
    yield server
    assert server.state.frames is not None
    server.state.frames = ChatFrames(server.state.frames.renderers)


@pytest.fixture
def sampler(served: Served) -> PlayedSampler:
    played = served.state.sampler
    assert isinstance(played, PlayedSampler)
    return played


def ask(served: Served, **options: Any) -> Any:
    client = served.openai()
    return client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | options))


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The deltas of a stream, put together as a client does."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            whole["content"] += choice.delta.content or ""
            whole["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(whole["calls"]):
                    whole["calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
                whole["calls"][call.index]["arguments"] += call.function.arguments or ""
            whole["finish"] = choice.finish_reason or whole["finish"]
    return whole


def test_an_answer_has_text_reasoning_calls_and_usage(served: Served, sampler: PlayedSampler) -> None:
    answer = ask(served, tools=OPENAI_TOOLS)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("I read é.", "tool_calls")
    assert message.reasoning_content.strip() == "look"
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"path": "a.py", "offset": 3},
        {"path": "b.py"},
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.usage.completion_tokens == len(answer_tokens(FIRST))
    assert answer.usage.prompt_tokens == len(sampler.requests[0].suffix)
    assert (answer.model, answer.system_fingerprint) == (MODEL, "scripted@0")
    assert not sampler.open_sessions and not served.state.live


def test_a_stream_adds_up_to_the_whole_answer(served: Served, sampler: PlayedSampler) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(served, tools=OPENAI_TOOLS, **options))
    streamed = joined(chunks)
    sampler.answers = replies([FIRST])
    whole = ask(served, tools=OPENAI_TOOLS).choices[0]
    assert streamed["content"] == whole.message.content
    assert streamed["reasoning"] == whole.message.reasoning_content
    assert streamed["finish"] == whole.finish_reason == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in streamed["calls"]] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert chunks[-1].usage.completion_tokens == len(answer_tokens(FIRST))


def test_the_arguments_of_a_call_come_while_they_are_written(served: Served, sampler: PlayedSampler) -> None:
    sampler.answers = replies([call_text("a/very/long/path/to/some/file.py", 7)])
    deltas = [
        call.function.arguments
        for chunk in ask(served, tools=OPENAI_TOOLS, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert len(deltas) > 5, "several pieces, not one"
    assert json.loads("".join(deltas)) == {"path": "a/very/long/path/to/some/file.py", "offset": 7}


@pytest.mark.parametrize("value", ['say "hi" \\ and\n\ttabs, é 🙂', "", "}", '{"a": [1]}'])
def test_any_text_is_carried_by_the_json_of_both_grammars(value: str) -> None:
    model, renderer = xml_model()
    xml = PlayedSampler(tokens=lambda context: renderer.message([ToolCall("read_file", {"path": value})]))
    escaped = json.dumps(value, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "read_file", "arguments": {{"path": {escaped}}}}}\n</tool_call>'
    for state in (make_state(xml, model=model), make_state(PlayedSampler(lambda context: text))):
        with serving(state) as served:
            whole = ask(served, tools=OPENAI_TOOLS).choices[0].message.tool_calls[0].function
            streamed = joined(list(ask(served, tools=OPENAI_TOOLS, stream=True)))
        assert json.loads(whole.arguments) == {"path": value}
        assert streamed["calls"][0]["arguments"] == whole.arguments


def test_a_malformed_call_is_never_valid_json(served: Served, sampler: PlayedSampler) -> None:
    cut = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py", "offset": wrong}}\n</tool_call>'
    sampler.answers = replies([cut, "<tool_call>\nnonsense\n</tool_call> and words", "</tool_call>x"])
    answer = ask(served, tools=OPENAI_TOOLS).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "read_file"
    with pytest.raises(ValueError):
        json.loads(call.function.arguments)
    second = ask(served, tools=OPENAI_TOOLS).choices[0]
    assert (second.finish_reason, second.message.tool_calls) == ("stop", None)
    assert "nonsense" in second.message.content and "and words" in second.message.content
    assert ask(served, tools=OPENAI_TOOLS).choices[0].message.tool_calls is None


def test_a_call_with_wrong_arguments_is_a_call_and_text_that_was_no_text_is_never_valid_json(
    served: Served, sampler: PlayedSampler
) -> None:
    body = '<tool_call>\n{"name": "read_file", "arguments": %s}\n</tool_call>'
    wrong = {"path": "a.py", "offset": "three", "why": "to see"}
    texts = [body % json.dumps(wrong), body % '{"path": 5}']
    sampler.answers = replies([texts[0]] * 2 + [texts[1]])
    whole = ask(served, tools=OPENAI_TOOLS).choices[0]
    streamed = joined(list(ask(served, tools=OPENAI_TOOLS, stream=True)))
    for arguments in (whole.message.tool_calls[0].function.arguments, streamed["calls"][0]["arguments"]):
        assert json.loads(arguments) == wrong
    assert streamed["finish"] == whole.finish_reason == "tool_calls"
    (call,) = ask(served, tools=OPENAI_TOOLS).choices[0].message.tool_calls
    with pytest.raises(ValueError):
        json.loads(call.function.arguments)


def test_calls_are_text_without_tools_or_with_tool_choice_none(
    served: Served, sampler: PlayedSampler
) -> None:
    sampler.answers = replies([call_text("a.py")] * 2)
    for options in ({}, {"tools": OPENAI_TOOLS, "tool_choice": "none"}):
        answer = ask(served, **options).choices[0]
        assert answer.message.tool_calls is None and "read_file" in answer.message.content


def test_one_call_at_a_time_ends_with_the_first(served: Served, sampler: PlayedSampler) -> None:
    answer = ask(served, tools=OPENAI_TOOLS, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"path": "a.py", "offset": 3}
    assert answer.usage.completion_tokens < len(answer_tokens(FIRST))
    assert sampler.aborted == [sampler.requests[0].id]


def test_the_next_turn_holds_the_sampled_tokens_themselves(served: Served, sampler: PlayedSampler) -> None:
    history = list(MESSAGES)
    answer = ask(served, tools=OPENAI_TOOLS).choices[0].message
    told = answer.model_dump(exclude_none=True)
    del told["reasoning_content"]  # as many clients do
    history += [told, *({"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in answer.tool_calls)]
    ask(served, messages=history, tools=OPENAI_TOOLS)
    first, second = (request.suffix for request in sampler.requests)
    before = np.concatenate([first, answer_tokens(FIRST)])
    assert second[: len(before)].tolist() == before.tolist()


def test_answers_of_other_keys_or_other_conversations_are_not_seen(
    served: Served, sampler: PlayedSampler
) -> None:
    sampler.answers = replies(["<think>\nsecret\n</think>\n\nDone.", "x", "y"])
    ask(served)
    ask(
        served,
        messages=[
            {"role": "user", "content": "Other."},
            {"role": "assistant", "content": "Done."},
            MESSAGES[1],
        ],
    )
    assert "secret" not in qwen_tokenizer().decode(sampler.requests[1].suffix)
    ask(served, messages=[*MESSAGES, {"role": "assistant", "content": "Done."}, MESSAGES[1]])
    assert "secret" in qwen_tokenizer().decode(sampler.requests[2].suffix)


def test_samples_differ_by_their_noise_alone(served: Served, sampler: PlayedSampler) -> None:
    sampler.answers = replies(["A.", "B.", "C."])
    answer = ask(served, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"A.", "B.", "C."}
    assert sorted(request.rng_key for request in sampler.requests) == [(7, 0), (7, 1), (7, 2)]
    assert len({request.suffix.tobytes() for request in sampler.requests}) == 1
    assert answer.usage.prompt_tokens == len(sampler.requests[0].suffix)


def test_sampling_parameters_reach_the_sampler(served: Served, sampler: PlayedSampler) -> None:
    extra = {"top_k": 40, "min_p": 0.05, "user": "someone"}
    ask(served, temperature=0.5, top_p=0.9, max_completion_tokens=11, extra_body=extra)
    params, request = sampler.requests[0].params, sampler.requests[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert params.max_tokens == 11 and request.streaming and request.pool == "serve"


def test_max_tokens_cuts_and_says_so(served: Served) -> None:
    answer = ask(served, max_tokens=4)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_before_it(
    served: Served, sampler: PlayedSampler, stream: bool
) -> None:
    sampler.answers = replies(["Here it is. END of all, and more words."])
    answer = ask(served, stop=["END of", "never"], stream=stream)
    content = joined(list(answer))["content"] if stream else answer.choices[0].message.content
    assert content == "Here it is."
    assert sampler.aborted and not sampler.open_sessions


def test_logprobs_come_for_each_token_with_alternatives_and_raw_ones(served: Served) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "extra_body": {"raw_logprobs": True}}
    answer = ask(served, **options)
    rows = answer.choices[0].logprobs.content
    assert len(rows) == answer.usage.completion_tokens
    assert b"".join(bytes(row.bytes) for row in rows).startswith(b"<think>\nlook")
    assert [row.logprob for row in rows[:3]] == [0.0, -1 / 64, -2 / 64]
    assert rows[2].raw_logprob == pytest.approx(-1 - 2 / 64)
    assert [len(row.top_logprobs) for row in rows] == [2] * len(rows)
    assert rows[0].top_logprobs[0].token == rows[0].token


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(served: Served, sampler: PlayedSampler) -> None:
    sampler.answers = replies(["Some words."] * 2)
    chunks = list(ask(served, stream=True, logprobs=True))
    rows = [row for chunk in chunks for one in chunk.choices if one.logprobs for row in one.logprobs.content]
    assert rows == ask(served, logprobs=True).choices[0].logprobs.content


def test_a_long_conversation_is_read_in_a_thread_as_a_short_one_is(
    served: Served, sampler: PlayedSampler
) -> None:
    long = [{"role": "user", "content": f"{number} " + "word " * 12} for number in range(2000)]
    tokens = served.http().post("/tokenize", json={"messages": long}).json()
    short = served.http().post("/tokenize", json={"messages": long[:1]}).json()
    assert tokens["count"] > 2000 * (short["count"] - 5)
    end = short["count"] - 4  # without the frame of the answer
    assert tokens["tokens"][:end] == short["tokens"][:end]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, messages=long)
    assert caught.value.code == "context_length_exceeded" and not sampler.requests


def test_tokens_are_counted_of_the_prompt_that_the_same_key_would_have(
    served: Served, sampler: PlayedSampler
) -> None:
    sampler.answers = replies(["<think>\nsecret\n</think>\n\nDone.", "x"])
    ask(served)
    turns = [MESSAGES[1], {"role": "assistant", "content": "Done."}, MESSAGES[1]]
    history: dict[str, dict[str, Any]] = {
        "/tokenize": {"messages": [MESSAGES[0], *turns]},
        "/v1/messages/count_tokens": {"system": MESSAGES[0]["content"], "messages": turns},
    }
    with served.http() as client:
        told = [
            client.post(path, json={"model": MODEL, **body}).raise_for_status().json()
            for path, body in history.items()
        ]
    ask(served, messages=[MESSAGES[0], *turns])
    length = len(sampler.requests[-1].suffix)
    assert [one.get("count", one.get("input_tokens")) for one in told] == [length, length]
