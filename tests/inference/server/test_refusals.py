"""Invalid requests are refused with the field's name, and the server keeps working."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import SamplerError
from etude.inference.server import ServedModel
from tests.environment.recording.recording_builders import OPENAI_TOOLS, qwen_tokenizer
from tests.inference.server.serving import (
    MODEL,
    PlayedSampler,
    PlayedSink,
    Served,
    make_state,
    qwen_model,
    serving,
    wait_for,
)

openai = pytest.importorskip("openai", reason="the openai client is not installed")

MESSAGES = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(make_state(PlayedSampler(lambda context: "Done."), body_bytes=20_000)) as running:
        yield running
        assert running.openai().chat.completions.create(model=MODEL, messages=MESSAGES).choices


def post(served: Served, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    with served.http(**headers) as http:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = http.post(path, content=data)
        return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "body"),
        ({"temperature": float("inf")}, "body"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"store": True}, "store"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "other"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function"),
        ({"tools": [*OPENAI_TOOLS, *OPENAI_TOOLS]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "ok"}]}, "messages[0].tool_call_id"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"model": 5}, "model"),
    ],
)
def test_each_wrong_field_of_a_chat_is_named(served: Served, options: dict[str, Any], field: str) -> None:
    status, error = post(served, "/v1/chat/completions", {"model": MODEL, "messages": MESSAGES} | options)
    assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert "fix:" in error["message"] or "received" in error["message"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 1 << 40]}, "prompt[1]"),
        ({"prompt": [[1], ["x"]]}, "prompt[1][0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"logprobs": 99}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "tail"}, "suffix"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ],
)
def test_each_wrong_field_of_a_completion_is_named(
    served: Served, options: dict[str, Any], field: str
) -> None:
    status, error = post(served, "/v1/completions", {"model": MODEL, "prompt": "x"} | options)
    assert (status, error["param"]) == (400, field)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"messages": ' + b"[" * 5000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_no_json_object_is_refused(served: Served, path: str, body: bytes) -> None:
    status, error = post(served, path, body)
    assert (status, error["param"]) == (400, "body")


def test_neutral_values_of_what_is_not_supported_are_taken(served: Served) -> None:
    neutral = {"frequency_penalty": 0, "response_format": {"type": "text"}, "logit_bias": {}, "store": False}
    harmless = {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "functions": None}
    harmless |= {"reasoning_effort": "low", "verbosity": "low"}
    answer = served.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={**neutral, **harmless}
    )
    assert answer.choices[0].message.content == "Done."


def test_an_unknown_model_is_not_found_and_the_served_one_is_named(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.openai().chat.completions.create(model="gpt", messages=MESSAGES)
    assert caught.value.code == "model_not_found" and MODEL in str(caught.value)


def test_a_prompt_that_is_too_long_is_told_so(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 3000}]
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai().completions.create(model=MODEL, prompt=[65] * 2000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "words",
    [
        r"maximum context length is \d+ tokens",  # opencode 1.18
        r"maximum context length is\s*\d+\s*tokens?[\s\S]*?resulted in\s*\d+\s*tokens?",  # Qwen Code 0.15
        "this model's maximum context length is",  # litellm 1.81, and so aider
    ],
)
def test_agents_know_a_prompt_that_is_too_long_by_the_words_of_the_error(served: Served, words: str) -> None:
    messages = [{"role": "user", "content": "word " * 3000}]
    status, error = post(served, "/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert status == 400 and re.search(words, error["message"])


def test_an_answer_is_cut_to_the_room_that_the_context_has() -> None:
    sampler = PlayedSampler(lambda context: "Done.")
    with serving(make_state(sampler, model=qwen_model(40))) as served:
        answer = served.openai().completions.create(model=MODEL, prompt=[65] * 38, max_tokens=500)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")


def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    body = {"model": MODEL, "prompt": "x" * 30_000}
    assert post(served, "/v1/completions", body)[0] == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 1000

    with served.http() as http:
        assert http.post("/v1/completions", content=pieces()).status_code == 413


def test_unknown_paths_methods_and_extensions_are_told(served: Served) -> None:
    with served.http() as http:
        assert http.get("/v1/embeddings").json()["error"]["message"].endswith("GET /v1/embeddings")
        assert http.get("/v1/completions").status_code == 405
    body = {"model": MODEL, "messages": MESSAGES}
    assert post(served, "/v1/chat/completions", body, **{"x-etude-extensions": "magic"})[0] == 400
    assert post(served, "/v1/chat/completions", body, **{"x-session-id": "x" * 300})[0] == 400


def test_a_model_without_a_chat_frame_takes_completions_alone() -> None:
    tokenizer = qwen_tokenizer()
    model = ServedModel(MODEL, tokenizer, frozenset((tokenizer.control_id("<|im_end|>"),)), 100)
    with serving(make_state(PlayedSampler(lambda context: "Done."), model=model)) as served:
        assert served.openai().completions.create(model=MODEL, prompt="x").choices[0].text == "Done."
        with pytest.raises(openai.NotFoundError):
            served.openai().chat.completions.create(model=MODEL, messages=MESSAGES)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    ["messages", "prompt", "tools", "tool_choice", "n", "seed", "stop", "temperature", "top_p", "logprobs"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(_NAMES, _VALUES, max_size=4), chat=st.booleans())
def test_no_body_is_a_defect_of_ours(served: Served, body: dict[str, Any], chat: bool) -> None:
    base = {"messages": MESSAGES} if chat else {"prompt": "x"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with served.http() as http:
        data = json.dumps(base | body).encode("utf-8", "surrogatepass")
        answer = http.post(path, content=data)
    assert answer.status_code in (200, 400, 404), answer.text


# ---- what is not the client's doing -------------------------------------------------------------


@pytest.fixture
def sampler() -> PlayedSampler:
    return PlayedSampler(lambda context: "Kept and more words.")


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_refuses_is_a_503_that_clients_try_again(sampler: PlayedSampler, stream: bool) -> None:
    sampler.failures = ["before"]
    with serving(make_state(sampler)) as served:
        answer = served.openai(max_retries=1).chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=stream
        )
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
    assert text == "Kept and more words." and not sampler.open_sessions


def test_an_engine_that_dies_in_mid_stream_is_an_error_event(sampler: PlayedSampler) -> None:
    sampler.failures = ["amid"]
    with serving(make_state(sampler)) as served:
        client = served.openai()
        with pytest.raises(openai.APIError, match="engine died"):
            list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content
        assert not served.state.live and not sampler.open_sessions
        assert served.state.metrics.total("etude_serve_engine_failures") == 1


def test_a_defect_of_ours_tells_nothing_and_harms_nobody(sampler: PlayedSampler) -> None:
    def broken(context: Any) -> str:
        raise RuntimeError("a secret path")

    sampler.answers = broken
    with serving(make_state(sampler)) as served:
        status, error = post(served, "/v1/completions", {"prompt": "x"})
        assert (status, error["code"]) == (500, "internal_error") and "secret" not in error["message"]
        sampler.answers = lambda context: "Done."
        assert served.openai().completions.create(model=MODEL, prompt="x").choices[0].text == "Done."


def test_an_answer_that_takes_too_long_is_ended(sampler: PlayedSampler) -> None:
    sampler.pause_s = 600.0
    with serving(make_state(sampler, answer_s=0.2)) as served:
        assert post(served, "/v1/completions", {"prompt": "x"})[0] == 503
        assert sampler.aborted and not sampler.open_sessions


def test_nothing_is_served_before_a_version_or_after_a_failure(sampler: PlayedSampler) -> None:
    sink = PlayedSink(None)
    state = make_state(sampler, sink)
    with serving(state) as served:
        status, error = post(served, "/v1/completions", {"prompt": "x"})
        assert (status, error["code"]) == (503, "unavailable")
        with served.http() as http:
            assert http.get("/ready").status_code == 503 and http.get("/health").status_code == 200
            state.failure = lambda: SamplerError("dead")
            assert http.get("/health").status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(sampler: PlayedSampler, stream: bool) -> None:
    sampler.answers, sampler.pause_s = (lambda context: "word " * 200), 600.0
    with serving(make_state(sampler)) as served:
        body = json.dumps({"prompt": "x", "stream": stream, "max_tokens": 900}).encode()
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            wait_for(lambda: sampler.requests)
            if stream:
                received = b""
                while b"data:" not in received:
                    received += raw.recv(65536)
        wait_for(lambda: not served.state.live)
        wait_for(lambda: sampler.aborted == [sampler.requests[0].id] and not sampler.open_sessions)
        assert served.state.metrics.total("etude_serve_aborted") == 1
