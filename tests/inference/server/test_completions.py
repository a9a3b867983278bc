"""Completions and tokenisation, by the official client and by plain HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.environment.recording.recording_builders import OPENAI_TOOLS, answer_tokens, qwen_tokenizer
from tests.inference.server.serving import MODEL, PlayedSampler, Served, make_state, replies, serving

openai = pytest.importorskip("openai", reason="the openai client is not installed")

TEXT = "def tally():\n    return é 🙂\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(make_state(PlayedSampler(lambda context: TEXT))) as running:
        yield running


@pytest.fixture
def sampler(server: Served) -> PlayedSampler:
    played = server.state.sampler
    assert isinstance(played, PlayedSampler)
    played.answers = lambda context: TEXT
    played.requests.clear()
    return played


def complete(server: Served, **options: Any) -> Any:
    return server.openai().completions.create(
        **({"model": MODEL, "prompt": "Write:", "max_tokens": 200} | options)
    )


def test_a_prompt_goes_on_as_text_without_a_frame(server: Served, sampler: PlayedSampler) -> None:
    answer = complete(server)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert qwen_tokenizer().decode(sampler.requests[0].suffix) == "Write:"
    assert answer.usage.completion_tokens == len(answer_tokens(TEXT))


def test_sixteen_tokens_are_the_default(server: Served, sampler: PlayedSampler) -> None:
    answer = complete(server, max_tokens=openai.NOT_GIVEN)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_prompts_may_be_token_ids_and_many(server: Served, sampler: PlayedSampler) -> None:
    sampler.answers = replies([f"{number}." for number in range(4)])
    answer = complete(server, prompt=[[65, 66], [67]], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    by_key = {request.rng_key[1]: request.suffix.tolist() for request in sampler.requests}
    assert by_key == {0: [65, 66], 1: [65, 66], 2: [67], 3: [67]}
    assert answer.usage.prompt_tokens == 3, "samples of one prompt share it"


def test_tokens_that_the_sampler_found_cached_are_told_once_for_each_prompt(
    server: Served, sampler: PlayedSampler
) -> None:
    def told(**options: Any) -> int:
        return complete(server, **options).usage.prompt_tokens_details.cached_tokens

    def counted() -> float:
        with server.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("etude_serve_cached_tokens"))

    assert told() == 0, "a sampler that does not tell"
    before = counted()
    sampler.cached = 2
    try:
        assert told() == told(n=3) == 2
        assert told(prompt=[[65, 66, 67], [68, 69, 70]], n=2) == 4
        chunks = complete(server, stream=True, stream_options={"include_usage": True})
        assert next(one.usage for one in chunks if one.usage).prompt_tokens_details.cached_tokens == 2
        assert counted() - before == 10
    finally:
        sampler.cached = None


def test_a_stream_adds_up_characters_whole(server: Served, sampler: PlayedSampler) -> None:
    chunks = list(complete(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    assert chunks[-1].usage.completion_tokens == len(answer_tokens(TEXT))


@pytest.mark.parametrize("stops", ["return", ["zzz", "é 🙂"], ["tally():\n    return"]])
def test_a_stop_string_is_found_across_tokens(server: Served, sampler: PlayedSampler, stops: Any) -> None:
    first = stops if isinstance(stops, str) else stops[-1]
    answer = complete(server, stop=stops)
    assert answer.choices[0].text == TEXT[: TEXT.index(first)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = complete(server, stop=stops, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_logprobs_have_the_old_layout(server: Served, sampler: PlayedSampler) -> None:
    sampler.answers = lambda context: "abc def"
    logprobs = complete(server, logprobs=2).choices[0].logprobs
    tokens = [qwen_tokenizer().decode([one]) for one in answer_tokens("abc def").tolist()]
    assert logprobs.tokens == tokens
    assert logprobs.token_logprobs == [-place / 64 for place in range(len(tokens))]
    assert logprobs.text_offset == np.cumsum([0, *(len(one) for one in tokens[:-1])]).tolist()
    assert all(1 <= len(row) <= 2 for row in logprobs.top_logprobs)


def test_tokenising_and_back(server: Served) -> None:
    with server.http() as http:
        tokens = http.post("/tokenize", json={"model": MODEL, "prompt": TEXT}).json()
        assert tokens["tokens"] == qwen_tokenizer().encode(TEXT).tolist()
        assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 2000)
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": TEXT}


def test_a_conversation_is_tokenised_as_it_would_be_sent(server: Served, sampler: PlayedSampler) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    with server.http() as http:
        told = http.post("/tokenize", json={"messages": messages, "tools": OPENAI_TOOLS}).json()
    server.openai().chat.completions.create(model=MODEL, messages=messages, tools=OPENAI_TOOLS)
    assert told["tokens"] == sampler.requests[0].suffix.tolist()


def test_models_are_listed_and_found_by_name(server: Served) -> None:
    (model,) = server.openai().models.list().data
    assert (model.id, model.max_model_len, model.version) == (MODEL, 2000, "scripted@0")
    assert server.openai().models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("other")
