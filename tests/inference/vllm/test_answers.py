"""vLLM's answers are parsed completely, or refused."""

from __future__ import annotations

import base64
import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SamplerError
from etude.inference.vllm.answers import read_part, read_routes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def answer(**changes: Any) -> dict[str, Any]:
    """As vLLM 0.32 was seen to answer."""
    top = [
        {"token_id": 7, "logprob": -2.5, "rank": 3},
        {"token_id": 4, "logprob": -0.5, "rank": 1},
        {"token_id": 5, "logprob": -9999.0, "rank": 2},
    ]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [7],
        "routed_experts": None,
        "weight_versions": [{"version": "a", "start": 0, "end": 1}],
        "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
    }
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return {"usage": usage, "prompt_logprobs": None, "choices": [choice | changes]}


def test_an_answer_is_read() -> None:
    part = read_part(answer(), 2)
    assert part.finish == "length" and part.cached_tokens == 2
    assert part.spans[0].label == "a" and part.spans[0].end == 1
    assert part.sampled.tokens.tolist() == [7] and part.sampled.logprobs.tolist() == [-2.5]
    assert part.sampled.top_tokens is not None and part.sampled.top_logprobs is not None
    assert part.sampled.top_tokens.tolist() == [[4, -1]], "what is impossible is no alternative"
    assert part.sampled.top_logprobs.tolist() == [[-0.5, -np.inf]]


def test_routes_sent_within_an_answer_are_read() -> None:
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    file = io.BytesIO()
    np.save(file, routes)
    part = read_part(answer(routed_experts=base64.b64encode(file.getvalue()).decode()), 0)
    assert part.routes is not None and part.routes.start == 0
    np.testing.assert_array_equal(part.routes.experts, routes)


def test_prompt_logprobs_begin_with_zero() -> None:
    document = answer() | {"prompt_logprobs": [None, {"9": {"logprob": -1.5}}]}
    found = read_part(document, 0).prompt_logprobs
    assert found is not None and found.tolist() == [0.0, -1.5]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": [{}], "usage": 3},
        answer(token_ids=[8]),
        answer(finish_reason="error"),
        answer(weight_versions=[{"version": "a"}]),
        answer(routed_experts="no base64"),
    ],
)
def test_what_is_no_answer_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(SamplerError):
        read_part(document, 0)


@given(JSON, st.integers(0, 2))
def test_no_document_raises_anything_else(document: Any, count: int) -> None:
    for given_document in (document, {"choices": [document]}, {"choices": document}):
        with contextlib.suppress(SamplerError):
            read_part(given_document, count)


@given(
    st.dictionaries(st.sampled_from(["start", "shape", "dtype", "data"]), JSON),
    st.integers(0, 4),
    st.binary(max_size=16),
)
def test_routes_are_read_or_refused(document: dict[str, Any], length: int, data: bytes) -> None:
    text = base64.b64encode(data).decode()
    good = {"start": 1, "shape": [length, 2, 2], "dtype": "uint8", "data": text}
    for candidate in (document, good, good | document):
        try:
            found = read_routes(candidate)
        except SamplerError:
            continue
        assert found.experts.ndim == 3
