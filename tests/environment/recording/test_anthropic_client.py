"""The official Anthropic client against the recording endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from etude.store.trajectories import TrajectoryLog
from tests.environment.recording.recording_builders import (
    ANTHROPIC_TOOLS,
    answer_tokens,
    call_text,
    make_recordings,
    replies,
)
from tests.environment.recording.serving import Served, SlowSampler, serving

pytestmark = [pytest.mark.slow, pytest.mark.foreign]

SYSTEM = [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}]
USER = {"role": "user", "content": "Fix lib/tally.py."}
FIRST = f"<think>\nlook\n</think>\n\nI read é.\n{call_text('a.py', 3)}\n{call_text('b.py')}"


@pytest.fixture
def sampler() -> SlowSampler:
    return SlowSampler(replies([FIRST, "Done.", "More."]), chunk_tokens=3)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that ask it nothing twice."""
    store = tmp_path_factory.mktemp("store")
    with serving(make_recordings(SlowSampler(lambda context: "Done."), store)) as running:
        yield running


@pytest.fixture
def served(tmp_path: Path, sampler: SlowSampler) -> Iterator[Served]:
    with serving(make_recordings(sampler, tmp_path)) as running:
        yield running


def client_of(session: dict[str, Any]) -> Any:
    return anthropic.Anthropic(
        base_url=session["anthropic_base_url"], api_key="unused", max_retries=0, timeout=60
    )


def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    body = {"model": "m", "max_tokens": 500, "system": SYSTEM, "tools": ANTHROPIC_TOOLS, **options}
    return client.messages.create(messages=messages, **body)


def results(message: Any) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": [{"type": "text", "text": block.input["path"]}],
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": [*reversed(blocks), {"type": "text", "text": "Go on."}]}


@pytest.mark.parametrize("keep_blocks", ["all", "no thinking"])
def test_an_unmodified_agent_is_one_segment(served: Served, tmp_path: Path, keep_blocks: str) -> None:
    session = served.create()
    client = client_of(session)
    first = ask(client, [USER])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.content[0].thinking.strip() == "look" and first.content[1].text == "I read é."
    assert first.content[2].input == {"path": "a.py", "offset": 3}
    assert first.stop_reason == "tool_use" and first.usage.output_tokens == len(answer_tokens(FIRST))
    blocks = [b for b in first.content if keep_blocks == "all" or b.type != "thinking"]
    second = ask(client, [USER, {"role": "assistant", "content": blocks}, results(first)])
    assert second.content[0].text == "Done." and second.stop_reason == "end_turn"
    with served.control() as control:
        control.post(f"/sessions/{session['id']}/reward", json={"task": 0.5})
        told = control.post(f"/sessions/{session['id']}/finish", json={}).json()
    assert (told["segments"], told["reward"]) == (1, 0.5)
    (group,) = TrajectoryLog(tmp_path).read()
    (trajectory,) = group.members
    assert [result.output for result in trajectory.turns[0].results] == ["a.py", "b.py"], "in call order"
    spans = trajectory.segments[0].turn_spans
    assert [span.role for span in spans if span.role in ("tool",)] == ["tool"]


def test_the_stream_adds_up_to_the_answer(served: Served) -> None:
    client = client_of(served.create())
    with client.messages.stream(
        model="m", max_tokens=500, system=SYSTEM, tools=ANTHROPIC_TOOLS, messages=[USER]
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[1].text == "I read é."
    assert [block.input for block in message.content[2:]] == [{"path": "a.py", "offset": 3}, {"path": "b.py"}]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(answer_tokens(FIRST))


def test_stop_sequences_are_named(served: Served) -> None:
    answer = ask(client_of(served.create()), [USER], stop_sequences=["never", "read"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "read")
    assert [block.text for block in answer.content if block.type == "text"] == ["I"]


def test_a_malformed_call_is_text_and_counted(served: Served, sampler: SlowSampler) -> None:
    bad = '<tool_call>\n{"name": "read_file", "arguments": {"path": 1}\n</tool_call>'
    sampler.answers = replies([f"I try.\n{bad}\n{call_text('a.py')}"])
    session = served.create()
    answer = ask(client_of(session), [USER])
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert answer.content[0].text == f"I try.\n{bad}"
    with served.control() as control:
        assert control.get(f"/sessions/{session['id']}").json()["counts"]["malformed_calls"] == 1


def test_tokens_are_counted_as_the_answer_will_count_them(served: Served) -> None:
    session = served.create()
    client = client_of(session)
    counted = client.messages.count_tokens(model="m", system=SYSTEM, tools=ANTHROPIC_TOOLS, messages=[USER])
    assert ask(client, [USER]).usage.input_tokens == counted.input_tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"top_p": 0.5}}, "top_p"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            "last message",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(
    shared: Served, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client_of(shared.create()), options.pop("messages", [USER]), **options)
    assert words in caught.value.body["error"]["message"]
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_an_ended_session_and_an_unknown_one_are_told_apart(served: Served) -> None:
    session = served.create()
    client = client_of(session)
    ask(client, [USER])
    with served.control() as control:
        control.post(f"/sessions/{session['id']}/finish", json={})
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(client, [USER])
    assert caught.value.status_code == 410
    with pytest.raises(anthropic.NotFoundError):
        ask(client_of({"anthropic_base_url": f"{served.url}/s/none"}), [USER])
