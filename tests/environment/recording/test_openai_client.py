"""The official OpenAI client against the recording endpoint."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from etude.store.trajectories import TrajectoryLog
from tests.environment.recording.recording_builders import (
    OPENAI_TOOLS,
    answer_tokens,
    call_text,
    make_recordings,
    replies,
)
from tests.environment.recording.serving import Served, SlowSampler, serving, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.foreign]

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a coding agent."},
    {"role": "user", "content": "Fix lib/tally.py."},
]
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


def client_of(session: dict[str, Any], retries: int = 0) -> Any:
    return openai.OpenAI(
        base_url=session["openai_base_url"], api_key="unused", max_retries=retries, timeout=60
    )


def finish(served: Served, session: dict[str, Any], **body: Any) -> dict[str, Any]:
    with served.control() as control:
        answer = control.post(f"/sessions/{session['id']}/finish", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def test_an_unmodified_agent_is_recorded_and_stored(
    served: Served, sampler: SlowSampler, tmp_path: Path
) -> None:
    session = served.create(index=3, metadata={"level": 2})
    client = client_of(session)
    history: list[Any] = list(MESSAGES)
    first = client.chat.completions.create(model="m", messages=history, tools=OPENAI_TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "I read é." and message.reasoning_content.strip() == "look"
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"path": "a.py", "offset": 3},
        {"path": "b.py"},
    ]
    assert first.usage.completion_tokens == len(answer_tokens(FIRST))
    history += [message.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in message.tool_calls]
    second = client.chat.completions.create(model="m", messages=history, tools=OPENAI_TOOLS)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Done.", "stop")
    told = finish(served, session, reward={"task": 1.0, "terms": {"length": -0.1}})
    assert told["reward"] == pytest.approx(0.9) and told["segments"] == 1
    (group,) = TrajectoryLog(tmp_path).read()
    (trajectory,) = group.members
    assert str(trajectory.id) == session["trajectory"] == "r/t/e0/g0/3"
    (segment,) = trajectory.segments
    given = [chunk for chunks in sampler.given.values() for chunk in chunks]
    logprobs = np.concatenate([chunk.logprobs for chunk in given])
    assert segment.logprobs[segment.sampled].tolist() == logprobs.tolist()
    assert segment.routes is not None and trajectory.facts["metadata"] == {"level": 2}
    assert [turn.results[0].output for turn in trajectory.turns if turn.results] == ["ok"]
    assert finish(served, session) == told, "finishing again says the same"


def test_the_stream_adds_up_to_the_answer(served: Served) -> None:
    client = client_of(served.create())
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            tools=OPENAI_TOOLS,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I read é."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    written = ["".join(call.function.arguments for call in calls if call.index == place) for place in (0, 1)]
    assert [json.loads(arguments)["path"] for arguments in written] == ["a.py", "b.py"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    rows = [
        row for c in chunks if c.choices and c.choices[0].logprobs for row in c.choices[0].logprobs.content
    ]
    assert chunks[-1].usage.completion_tokens == len(answer_tokens(FIRST)) == len(rows)
    assert b"I read \xc3\xa9." in b"".join(bytes(row.bytes) for row in rows)


def test_a_session_is_found_by_its_key_or_by_a_header(served: Served) -> None:
    session = served.create()
    by_key = openai.OpenAI(base_url=f"{served.url}/v1", api_key=session["key"], max_retries=0)
    by_key.chat.completions.create(model="m", messages=MESSAGES)
    headers = {"X-Etude-Session": session["id"]}
    by_header = openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="tenant-token", default_headers=headers, max_retries=0
    )
    by_header.chat.completions.create(model="m", messages=MESSAGES)
    with served.control() as control:
        assert control.get(f"/sessions/{session['id']}").json()["counts"]["forks"] == 1
    for key, extra in (("wrong", {}), ("other-token", headers)):
        stranger = openai.OpenAI(
            base_url=f"{served.url}/v1", api_key=key, default_headers=extra, max_retries=0
        )
        with pytest.raises((openai.AuthenticationError, openai.NotFoundError)):
            stranger.chat.completions.create(model="m", messages=MESSAGES)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 2}, "n"),
        ({"top_p": 0.9}, "top_p"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(
    shared: Served, options: dict[str, Any], field: str
) -> None:
    client = client_of(shared.create())
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{"model": "m", "messages": MESSAGES, "tools": OPENAI_TOOLS, **options}
        )
    assert caught.value.param == field


def test_a_fixed_sampling_overrides_what_the_agent_asks_for(served: Served, sampler: SlowSampler) -> None:
    client = client_of(served.create(sampling={"temperature": 0.7, "max_tokens": 99}))
    client.chat.completions.create(model="m", messages=MESSAGES, temperature=0, top_p=0.5)
    assert (sampler.inner.requests[0].params.temperature, sampler.inner.requests[0].params.top_p) == (
        0.7,
        1.0,
    )


def test_a_stop_string_ends_the_answer_at_its_token(served: Served, sampler: SlowSampler) -> None:
    session = served.create()
    answer = client_of(session).chat.completions.create(model="m", messages=MESSAGES, stop=["read"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("I", "stop")
    told = finish(served, session)
    assert told["sampled_tokens"] == answer.usage.completion_tokens < len(answer_tokens(FIRST))


def test_one_call_at_a_time_ends_with_the_first_call(served: Served) -> None:
    client = client_of(served.create())
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=OPENAI_TOOLS, parallel_tool_calls=False
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["read_file"]
    assert answer.usage.completion_tokens < len(answer_tokens(FIRST))


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "a.py", "why": "to see"},
        {"offset": 3},
        {"path": "a.py", "offset": "3"},
        {"path": ["a.py"], "offset": None},
    ],
    ids=["unknown", "missing", "another kind", "null"],
)
def test_a_call_with_wrong_arguments_reaches_the_client_who_answers_it(
    served: Served, sampler: SlowSampler, arguments: dict[str, Any]
) -> None:
    """As words it would end the session of opencode and Qwen Code, which check arguments themselves."""
    call = json.dumps({"name": "read_file", "arguments": arguments})
    sampler.answers = replies([f"I read.\n<tool_call>\n{call}\n</tool_call>", "Done."])
    session = served.create()
    client, history = client_of(session), list(MESSAGES)
    choice = client.chat.completions.create(model="m", messages=history, tools=OPENAI_TOOLS).choices[0]
    (told,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I read.")
    assert (told.function.name, json.loads(told.function.arguments)) == ("read_file", arguments)
    history += [choice.message, {"role": "tool", "tool_call_id": told.id, "content": "invalid arguments"}]
    client.chat.completions.create(model="m", messages=history, tools=OPENAI_TOOLS)
    summary = finish(served, session)
    assert (summary["segments"], summary["facts"]["malformed_calls"]) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_sampler_that_is_dead_is_a_5xx_that_the_client_tries_again(
    served: Served, sampler: SlowSampler, stream: bool
) -> None:
    sampler.refusals = 1
    sampler.answers = replies(["Kept."])
    session = served.create()
    answer = client_of(session, retries=1).chat.completions.create(
        model="m", messages=MESSAGES, stream=stream
    )
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "Kept."
    else:
        assert answer.choices[0].message.content == "Kept."
    told = finish(served, session)
    assert (told["facts"]["failed"], told["sampled_tokens"]) == (1, len(answer_tokens("Kept.")))


def test_a_sampler_that_dies_in_mid_stream_is_an_error_event(served: Served, sampler: SlowSampler) -> None:
    sampler.failures = 1
    sampler.answers = replies(["Lost and more.", "Kept."])
    session = served.create()
    client = client_of(session)
    with pytest.raises(openai.APIError, match="died"):
        list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    client.chat.completions.create(model="m", messages=MESSAGES)
    told = finish(served, session)
    assert (told["segments"], told["sampled_tokens"]) == (1, len(answer_tokens("Kept.")))


def test_a_client_that_leaves_in_mid_stream_can_go_on_from_what_it_saw(
    served: Served, sampler: SlowSampler
) -> None:
    sampler.most_chunks, sampler.inner._chunk_tokens = 40, 1
    sampler.answers = replies(["one two three four five six seven eight nine ten " * 20, "Done."])
    session = served.create()
    client = client_of(session)
    stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    for number, _ in enumerate(stream):
        if number == 6:
            stream.close()
            break
    wait_for(lambda: not served.recordings.num_requests)
    (live,) = served.recordings._sessions.values()
    wait_for(lambda: live.map.counts.aborted == 1)
    kept = live.map.branches[0].entries[-1].message.text
    assert kept.startswith("one") and len(kept) < 200
    sampler.most_chunks = math.inf
    history = [*MESSAGES, {"role": "assistant", "content": kept}, {"role": "user", "content": "Go on."}]
    client.chat.completions.create(model="m", messages=history)
    told = finish(served, session)
    assert told["segments"] == 1 and told["facts"]["aborted"] == 1


def test_a_client_that_leaves_before_its_whole_answer_aborts_it(served: Served, sampler: SlowSampler) -> None:
    sampler.most_chunks = 1
    session = served.create()

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=session["openai_base_url"], api_key="x", timeout=60) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
            await asyncio.to_thread(wait_for, lambda: sampler.num_waiting)
            asking.cancel()
            await asyncio.wait({asking})

    asyncio.run(leave())
    wait_for(lambda: not served.recordings.num_requests)
    (live,) = served.recordings._sessions.values()
    wait_for(lambda: live.map.counts.aborted == 1)
    assert 0 < live.map.num_sampled_tokens < len(answer_tokens(FIRST))


def test_a_history_that_is_too_long_says_so(tmp_path: Path) -> None:
    from etude.environment.recording import MapLimits, RecordingLimits

    limits = RecordingLimits(session=MapLimits(max_context_tokens=32), body_bytes=4096)
    recordings = make_recordings(SlowSampler(replies([])), tmp_path, limits=limits)
    with serving(recordings) as running:
        client = client_of(running.create())
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "long " * 100}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.APIStatusError) as large:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 5000}])
        assert large.value.status_code == 413
