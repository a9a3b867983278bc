"""Requests pinned to a policy version: answered by it to the last token, or refused once it is replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from etude.records import PolicyVersion
from tests.inference.server.serving import MODEL, PlayedSampler, PlayedSink, Served, make_state, serving

TEXT = "It sums the numbers of a list, and then it sums the numbers of another list."
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What does it do?"}]}
PIN = {"x-etude-version": "scripted@0"}


@pytest.fixture
def sampler() -> PlayedSampler:
    return PlayedSampler(lambda _: TEXT)


@pytest.fixture
def served(sampler: PlayedSampler) -> Iterator[Served]:
    with serving(lambda: make_state(sampler)) as running:
        yield running


def ask(served: Served, headers: dict[str, str], **fields: Any) -> tuple[int, str]:
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json={**BODY, **fields}, headers=headers)
    return answer.status_code, answer.text


def test_the_version_in_service_answers_a_request_pinned_to_it(served: Served) -> None:
    status, text = ask(served, PIN)
    assert status == 200 and json.loads(text)["system_fingerprint"] == "scripted@0"


def test_a_version_that_is_not_in_service_is_refused_by_name(served: Served, sampler: PlayedSampler) -> None:
    status, text = ask(served, {"x-etude-version": "scripted@7"})
    error = json.loads(text)["error"]
    assert status == 409 and error["code"] == "version_not_served" and error["param"] == "x-etude-version"
    assert "scripted@7" in error["message"] and "scripted@0" in error["message"]
    assert not sampler.requests and not served.state.live


def test_a_stream_ends_with_an_error_where_its_version_is_replaced(
    served: Served, sampler: PlayedSampler
) -> None:
    sampler.swap_after = 2
    status, text = ask(served, PIN, stream=True)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert status == 200 and "[DONE]" not in text
    assert events[-1]["error"]["code"] == "version_not_served" and "scripted@1" in str(events[-1])
    told = {event["system_fingerprint"] for event in events[:-1]}
    assert told == {"scripted@0"}
    assert sampler.aborted and not served.state.live


def test_an_answer_in_one_piece_is_refused_where_its_version_is_replaced(
    served: Served, sampler: PlayedSampler
) -> None:
    sampler.swap_after = 2
    status, text = ask(served, PIN)
    assert status == 409 and json.loads(text)["error"]["code"] == "version_not_served"


def test_without_a_pin_an_answer_goes_on_with_the_new_version(served: Served, sampler: PlayedSampler) -> None:
    sampler.swap_after = 2
    status, text = ask(served, {})
    assert status == 200 and json.loads(text)["system_fingerprint"] == "scripted@1"


def test_a_pin_that_is_no_name_is_a_bad_request(served: Served) -> None:
    status, text = ask(served, {"x-etude-version": ""})
    assert status == 400 and json.loads(text)["error"]["param"] == "x-etude-version"


def test_a_pin_waits_for_weights_as_every_request_does() -> None:
    sink = PlayedSink(version=None)
    with serving(lambda: make_state(PlayedSampler(lambda _: TEXT), sink)) as running:
        assert ask(running, PIN)[0] == 503
        sink.version = PolicyVersion("scripted", 0)
        assert ask(running, PIN)[0] == 200
