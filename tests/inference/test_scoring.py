"""Scores come from the sampling kernels, and do not affect running sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import SamplerError
from etude.inference.scoring import Scoring
from etude.model import LanguageModel, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.scoring import score_sequences
from etude.records import Scores
from tests.inference.builders import (
    ALL_KERNELS,
    Client,
    drain,
    empty_engine,
    fresh_routes,
    needs_compiler,
    prompt,
    small_engine,
)
from tests.inference.invariants import check_engine
from tests.model.builders import VOCAB, random_tokens, small_config, small_model

DENSE: dict[str, Any] = {"architecture": "qwen3", "intermediate_size": 40, "tie_embeddings": False}


def model_of(**shape: Any) -> LanguageModel:
    model = build_model(small_config(**shape), VOCAB)
    model.initialise(7)
    return model.requires_grad_(requires_grad=False)


@needs_compiler
@pytest.mark.parametrize("shape", [{}, DENSE])
@settings(max_examples=10, deadline=None)
@given(length=st.integers(1, 100), step=st.integers(1, 120), threads=st.integers(1, 2))
def test_native_scores_are_the_invariant_trainers_bit_for_bit(
    shape: dict[str, Any], length: int, step: int, threads: int
) -> None:
    model, tokens = model_of(**shape), random_tokens(length)
    engine = small_engine(model, prefill_tokens=step, kernels="native", native_threads=threads)
    scores = engine.score(tokens)
    model.ops = InvariantOps()
    np.testing.assert_array_equal(scores.logprobs, score_sequences(model, [tokens])[0])
    if shape:
        assert scores.routes is None
    else:
        assert scores.routes is not None
        replayed = score_sequences(model, [tokens], routes=[scores.routes])[0]
        np.testing.assert_array_equal(replayed, scores.logprobs)
    check_engine(engine)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_scores_and_routes_are_those_of_the_whole_sequence(kernels: Any) -> None:
    model, tokens = small_model(2), random_tokens(77)
    scores = small_engine(model, prefill_tokens=30, kernels=kernels).score(tokens)
    np.testing.assert_allclose(scores.logprobs, score_sequences(model, [tokens])[0], atol=1e-5)
    assert scores.logprobs[0] == 0.0
    np.testing.assert_array_equal(scores.routes, fresh_routes(model, tokens))


def test_logits_are_taken_in_parts_where_the_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = small_model(2), random_tokens(50)
    whole = small_engine(model).score(tokens)
    monkeypatch.setattr("etude.inference.scoring._LOGIT_FLOATS", 3 * VOCAB)
    np.testing.assert_allclose(small_engine(model).score(tokens).logprobs, whole.logprobs, atol=1e-6)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_scoring_between_steps_changes_nothing_that_is_sampled(kernels: Any) -> None:
    def play(*, scoring: bool) -> list[Client]:
        engine = small_engine(model, kernels=kernels, num_pages=20)
        clients = [Client(f"c{i}", i) for i in range(3)]
        for turn in range(2):
            for number, client in enumerate(clients):
                client.ask(engine, prompt(9 + number, turn), max_tokens=12)
            for _ in range(5):
                for answer in engine.step():
                    {client.name: client for client in clients}[answer.request.session_id].take(
                        answer.chunks[-1]
                    )
                if scoring:
                    engine.score(random_tokens(60, turn))
                    check_engine(engine)
            drain(engine, clients)
        return clients

    model = small_model(3)
    plain, scored = play(scoring=False), play(scoring=True)
    assert [client.tokens for client in scored] == [client.tokens for client in plain]
    for client in scored:
        client.check(model)


def test_where_too_few_pages_are_free_nothing_is_scored_and_nobody_loses_any() -> None:
    engine = small_engine(num_pages=8)
    client = Client("busy", 1)
    client.ask(engine, prompt(90, 0), max_tokens=6)
    engine.step()
    with pytest.raises(SamplerError, match=r"too few pages.*engine\.cache_tokens"):
        engine.score(random_tokens(64))
    assert engine.counters.preemptions == 0
    drain(engine, [client])
    assert client.finish == "length"
    assert len(engine.score(random_tokens(100)).logprobs) == 100, "an idle session's pages may be taken"
    check_engine(engine)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "1 to 100 tokens"), ([1] * 101, "1 to 100 tokens"), ([3, VOCAB], "0..63"), ([-1], "0..63")],
)
def test_what_cannot_be_scored_is_refused(tokens: list[int], message: str) -> None:
    engine = small_engine()
    free = engine.num_free_pages
    with pytest.raises(SamplerError, match=message):
        engine.score(np.array(tokens, dtype=np.int32))
    assert engine.num_free_pages == free


def test_without_weights_nothing_is_scored() -> None:
    with pytest.raises(SamplerError, match="no weights yet"):
        empty_engine().score(random_tokens(3))


def test_pages_are_given_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    free = engine.num_free_pages

    def fail(scoring: Scoring) -> None:
        raise MemoryError

    monkeypatch.setattr(Scoring, "advance", fail)
    with pytest.raises(MemoryError):
        engine.score(random_tokens(40))
    assert engine.num_free_pages == free
    check_engine(engine)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_steps_between_the_parts_of_a_score_change_neither(kernels: Any) -> None:
    def play(*, scoring: bool) -> tuple[list[Client], list[Scores]]:
        engine = small_engine(model, prefill_tokens=16, kernels=kernels, num_pages=24)
        clients, scores = [Client(f"c{i}", i) for i in range(3)], list[Scores]()
        for number, client in enumerate(clients):
            client.ask(engine, prompt(20 + number, number), max_tokens=40)
        parts = engine.begin_score(tokens) if scoring else None
        while engine.has_work:
            for answer in engine.step():
                {client.name: client for client in clients}[answer.request.session_id].take(answer.chunks[-1])
            if parts is not None and not parts.is_done:
                parts.advance()
            elif parts is not None:
                engine.end_score(parts)
                scores.append(parts.scores())
                parts = None
            check_engine(engine)
        assert parts is None, "it was over before the sessions were"
        return clients, scores

    model, tokens = small_model(3), random_tokens(90)
    (plain, _), (scored, (scores,)) = play(scoring=False), play(scoring=True)
    assert [client.tokens for client in scored] == [client.tokens for client in plain]
    assert [client.logprobs for client in scored] == [client.logprobs for client in plain]
    alone = small_engine(model, prefill_tokens=16, kernels=kernels).score(tokens)
    np.testing.assert_array_equal(scores.logprobs, alone.logprobs)
    np.testing.assert_array_equal(scores.routes, alone.routes)


def test_who_lacks_the_pages_of_a_score_goes_on_after_it() -> None:
    model = small_model(3)
    engine, client = small_engine(model, prefill_tokens=16, num_pages=8), Client("late", 1)
    parts = engine.begin_score(random_tokens(90))
    client.ask(engine, prompt(50, 0), max_tokens=10)
    while not parts.is_done:
        assert engine.step() == []
        check_engine(engine)
        parts.advance()
    engine.end_score(parts)
    drain(engine, [client])
    client.check(model)
    check_engine(engine)
