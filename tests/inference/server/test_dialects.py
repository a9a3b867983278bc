"""Clients that others wrote, against both servers: every dialect, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from etude.errors import SamplerError
from tests.environment.recording import serving as recording
from tests.environment.recording.recording_builders import (
    ANTHROPIC_TOOLS,
    answer_tokens,
    call_text,
    make_recordings,
    qwen_tokenizer,
    replies,
)
from tests.inference.server.serving import MODEL, PlayedSampler, make_state, serving

pytestmark = [pytest.mark.slow, pytest.mark.foreign]

TOOL = {key: value for key, value in ANTHROPIC_TOOLS[0].items() if key != "input_schema"}
RESPONSE_TOOLS = [{"type": "function", **TOOL, "parameters": ANTHROPIC_TOOLS[0]["input_schema"]}]
FIRST = f"<think>\nlook\n</think>\n\nI read é.\n{call_text('a.py', 3)}\n{call_text('b.py')}"
USER = {"role": "user", "content": "Fix lib/tally.py."}


@dataclass
class Asked:
    """A server of one kind, and what it samples from."""

    openai_url: str
    anthropic_url: str
    sampler: Any

    def openai(self) -> Any:
        return openai.OpenAI(base_url=self.openai_url, api_key="unused", max_retries=0, timeout=60)

    def anthropic(self) -> Any:
        return anthropic.Anthropic(base_url=self.anthropic_url, api_key="unused", max_retries=0, timeout=60)

    def contexts(self) -> list[np.ndarray]:
        """The whole prompts, as the sampler saw them."""
        if isinstance(self.sampler, recording.SlowSampler):
            return list(self.sampler.contexts.values())
        return [request.suffix for request in self.sampler.requests]


@pytest.fixture(params=["serve", "record"])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Asked]:
    answers = replies([FIRST, "Done.", "More."])
    if request.param == "serve":
        sampler = PlayedSampler(answers)
        with serving(make_state(sampler)) as served:
            yield Asked(f"{served.url}/v1", served.url, sampler)
        return
    slow = recording.SlowSampler(answers, chunk_tokens=3)
    with recording.serving(make_recordings(slow, tmp_path)) as running:
        session = running.create()
        yield Asked(session["openai_base_url"], session["anthropic_base_url"], slow)


def respond(asked: Asked, given: Any, **options: Any) -> Any:
    body = {"model": MODEL, "instructions": "You are a coding agent.", "tools": RESPONSE_TOOLS, **options}
    return asked.openai().responses.create(input=given, **body)


def message(asked: Asked, messages: list[Any], **options: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 500, "system": "You are a coding agent.", **options}
    return asked.anthropic().messages.create(messages=messages, tools=ANTHROPIC_TOOLS, **body)


def test_a_response_has_items_and_its_next_turn_the_sampled_tokens(asked: Asked) -> None:
    first = respond(asked, "Fix lib/tally.py.")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (first.status, first.output_text) == ("completed", "I read é.")
    assert first.output[0].content[0].text.strip() == "look"
    assert [json.loads(item.arguments) for item in first.output[2:]] == [
        {"path": "a.py", "offset": 3},
        {"path": "b.py"},
    ]
    assert first.usage.output_tokens == len(answer_tokens(FIRST))
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"} for item in first.output[2:]
    ]
    second = respond(asked, [USER, *first.output, *reversed(results)])
    assert second.output_text == "Done."
    before, after = asked.contexts()
    held = np.concatenate([before, answer_tokens(FIRST)])
    assert after[: len(held)].tolist() == held.tolist()


def test_a_streamed_response_adds_up_to_the_whole_one(asked: Asked) -> None:
    with asked.openai().responses.stream(model=MODEL, input=[USER], tools=RESPONSE_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted({one.sequence_number for one in events})
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == "I read é."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["path"] for call in calls] == ["a.py", "b.py"]
    arguments = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == "".join(call.arguments for call in calls)
    assert final.usage.output_tokens == len(answer_tokens(FIRST))


def test_tools_that_ask_for_strict_arguments_are_taken_and_the_response_says_that_they_are_not(
    asked: Asked,
) -> None:
    response = respond(asked, "Fix lib/tally.py.", tools=[{**RESPONSE_TOOLS[0], "strict": True}])
    assert [item.type for item in response.output][-1] == "function_call"
    assert [tool.strict for tool in response.tools] == [False]


def test_a_response_that_is_cut_says_so(asked: Asked) -> None:
    answer = respond(asked, "Fix lib/tally.py.", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"name": "x", "type": "function", "parameters": 5}]}, "tools[0].parameters"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"given": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"given": []}, "input"),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(
    asked: Asked, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(asked, **{"given": "x", **options})
    assert caught.value.param == field


@pytest.mark.parametrize("stream", [False, True])
def test_messages_have_blocks_and_their_next_turn_the_sampled_tokens(asked: Asked, stream: bool) -> None:
    if stream:
        options = {"model": MODEL, "max_tokens": 500, "system": "You are a coding agent."}
        with asked.anthropic().messages.stream(messages=[USER], tools=ANTHROPIC_TOOLS, **options) as events:
            first = events.get_final_message()
    else:
        first = message(asked, [USER])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.content[2].input == {"path": "a.py", "offset": 3} and first.stop_reason == "tool_use"
    assert first.usage.output_tokens == len(answer_tokens(FIRST))
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "ok"} for block in first.content[2:]
    ]
    history = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    assert message(asked, history).content[0].text == "Done."
    before, after = asked.contexts()
    held = np.concatenate([before, answer_tokens(FIRST)])
    assert after[: len(held)].tolist() == held.tolist()


def test_anthropics_client_counts_the_tokens_of_a_prompt(asked: Asked) -> None:
    client = asked.anthropic()
    counted = client.messages.count_tokens(model=MODEL, messages=[USER], tools=ANTHROPIC_TOOLS)
    assert message(asked, [USER], system=anthropic.omit).usage.input_tokens == counted.input_tokens


def _told(caught: Any) -> dict[str, str]:
    """What Anthropic's client says that the error was."""
    return caught.value.body["error"]


def test_each_client_gets_errors_in_its_own_words(asked: Asked) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        message(asked, [USER], extra_body={"temperature": 9})
    assert _told(refused)["type"] == "invalid_request_error"
    assert "temperature" in _told(refused)["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        respond(asked, "x", temperature=9)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("asked", ["record"], indirect=True)
def test_a_forced_call_of_a_recorded_agent_is_left_to_the_model(asked: Asked) -> None:
    first = message(asked, [USER], tool_choice={"type": "any"})
    assert [block.type for block in first.content][-1] == "tool_use"
    response = respond(asked, "Fix lib/tally.py.", tool_choice="required")
    assert response.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_told_in_the_clients_words(asked: Asked, stream: bool) -> None:
    async def fails(request: Any) -> Any:
        raise SamplerError("the engine is dead")
        yield

    asked.sampler.stream = fails
    with pytest.raises(anthropic.APIStatusError) as caught:
        message(asked, [USER], stream=stream)
    assert caught.value.status_code == 529 and _told(caught)["type"] == "overloaded_error"
    with pytest.raises(openai.InternalServerError) as refused:
        respond(asked, "x", stream=stream)
    assert refused.value.status_code == 503


def test_the_call_of_a_tool_that_was_not_offered_is_text_with_its_tags(asked: Asked) -> None:
    other = '<tool_call>\n{"name": "delete_all", "arguments": {"path": "/"}}\n</tool_call>'
    if isinstance(asked.sampler, recording.SlowSampler):
        asked.sampler.answers = replies([other] * 2)
    else:
        asked.sampler.reset(replies([other] * 2))
    answer = respond(asked, "Fix lib/tally.py.")
    assert [item.type for item in answer.output] == ["message"] and answer.output_text == other
    blocks = message(asked, [USER]).content
    assert [block.type for block in blocks] == ["text"] and blocks[0].text == other
    assert qwen_tokenizer().decode(answer_tokens(other)).startswith(other)
