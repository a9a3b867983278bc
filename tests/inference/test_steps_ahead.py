"""Several decoding steps in one call of the engine: the same results as step by step, in fewer calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.inference import Answer, Engine, MtpDrafts, NgramLookup
from tests.inference.builders import Client, needs_compiler, prompt, serve, small_engine
from tests.inference.invariants import check_engine
from tests.model.builders import draft_layers, small_model

pytestmark = needs_compiler
LENGTHS = [3, 15, 16, 21, 33]


def play(most_steps: int, requests: list[dict[str, Any]], **options: Any) -> tuple[Engine, list[Answer], int]:
    """All requests, each with a prompt of another length; the answers and how many calls it took."""
    options = {"num_sessions": len(requests)} | options
    engine = small_engine(kernels="native", **options)
    for number, request in enumerate(requests):
        client = Client(f"s{number}", number)
        engine.submit(client.request(prompt(LENGTHS[number % 5], number), **request))
    answers: list[Answer] = []
    calls = 0
    while engine.has_work:
        answers += engine.step(most_steps)
        calls += 1
        check_engine(engine)
    return engine, answers, calls


def bits(answers: list[Answer]) -> list[tuple[Any, ...]]:
    """Everything that sessions are told, in the order in which they are."""
    return [
        (
            answer.request.id,
            chunk.tokens.tolist(),
            chunk.logprobs.tobytes(),
            chunk.version,
            chunk.kv_oldest,
            chunk.finish,
            chunk.prefix_digest,
            chunk.routes_start,
            None if chunk.routes is None else chunk.routes.tobytes(),
        )
        for answer in answers
        for chunk in answer.chunks
    ]


@pytest.mark.parametrize("most_steps", [2, 7, 64])
def test_many_steps_in_one_call_give_the_bits_and_the_order_of_single_ones(most_steps: int) -> None:
    requests = [{"max_tokens": n} for n in (40, 30, 33, 40, 1, 17)]
    single, expected, calls = play(1, requests)
    ahead, answers, fewer = play(most_steps, requests)
    assert bits(answers) == bits(expected)
    assert ahead.counters == single.counters
    assert fewer <= -(-calls // most_steps) + len(requests), "one for each full run, one for each end"


def test_a_call_ends_with_the_step_in_which_a_request_stops() -> None:
    _, free, _ = play(1, [{"max_tokens": 40}])
    tokens: NDArray[np.int32] = free[0].chunks[0].tokens
    stop = int(tokens[9])
    at = tokens.tolist().index(stop) + 1
    requests = [{"max_tokens": 40, "stop_tokens": frozenset({stop})}, {"max_tokens": 40}]
    engine = small_engine(kernels="native")
    for number, request in enumerate(requests):
        engine.submit(Client(f"s{number}", number).request(prompt(LENGTHS[number], number), **request))
    answers: list[Answer] = []
    while not answers:
        answers = engine.step(64)
    assert [answer.chunks[-1].finish for answer in answers] == ["stop"]
    assert len(answers[0].chunks[0].tokens) == at
    assert engine.counters.decode_tokens == 2 * (at - 1), "nobody ran on behind the stop"


@pytest.mark.parametrize("wanted", [{"streaming": True}, {"top_logprobs": 2}], ids=["stream", "top"])
def test_whoever_waits_for_each_token_gets_it_after_each_step(wanted: dict[str, Any]) -> None:
    requests = [{"max_tokens": 12}, {"max_tokens": 12, **wanted}]
    engine, _, calls = play(64, requests)
    assert calls == engine.counters.steps


@pytest.mark.parametrize("drafts", ["lookup", "one layer", "two layers"])
def test_runs_with_drafts_give_the_bits_of_single_steps_without(drafts: str) -> None:
    """Some of the sessions stop early, and pages are short at times."""
    _, free, _ = play(1, [{"max_tokens": 40}])
    stop = frozenset({int(free[0].chunks[0].tokens[9])})
    requests = [{"max_tokens": n, "stop_tokens": stop} for n in (40, 30, 33, 40, 1, 17)]
    sources = {
        "lookup": NgramLookup(3, longest=2, shortest=1, adaptive=False),
        "one layer": MtpDrafts(draft_layers(small_model()), 3, adaptive=False),
        "two layers": MtpDrafts(draft_layers(small_model(), 2), 2, adaptive=False),
    }
    for num_pages in (30, 11):
        _, expected, _ = play(1, requests, num_pages=num_pages)
        engine, answers, calls = play(64, requests, num_pages=num_pages, drafts=sources[drafts])
        assert sorted(bits(answers)) == sorted(bits(expected))
        assert engine.counters.drafted_tokens > 0
        assert calls < engine.counters.steps


def test_where_pages_are_short_steps_are_single_and_results_the_same() -> None:
    requests = [{"max_tokens": 40}] * 4
    roomy, expected, _ = play(64, requests, max_tokens=80)
    short, answers, _ = play(64, requests, max_tokens=80, num_pages=9)
    assert short.counters.preemptions and not roomy.counters.preemptions
    assert sorted(bits(answers)) == sorted(bits(expected))


def test_weights_that_come_between_two_calls_count_from_the_next_token_on() -> None:
    def tokens(most_steps: int) -> list[Any]:
        engine = small_engine(kernels="native")
        engine.submit(Client("s", 0).request(prompt(8, 0), max_tokens=40))
        while engine.counters.steps < 13:
            engine.step(min(most_steps, 13 - engine.counters.steps))
        serve(engine, small_model(3), 1, "recompute")
        answers: list[Answer] = []
        while engine.has_work:
            answers += engine.step(most_steps)
        return bits(answers)

    assert tokens(64) == tokens(1)
