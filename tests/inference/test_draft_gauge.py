"""Sessions draft as much as pays, and those whose drafts are rejected cost almost nothing."""

from __future__ import annotations

import numpy as np
import pytest

from etude.inference import MtpDrafts, NgramLookup
from etude.inference.draft_gauge import DraftGauge, StepCost, step_cost
from tests.inference.builders import ALL_KERNELS, Client, drain, prompt, serve, small_engine
from tests.model.builders import draft_layers, small_model

_MOST = 4


def play(gauge: DraftGauge, share: float, rows: list[int], arrival: int, steps: int = 200) -> list[int]:
    """What the sessions in `rows` want in each of some steps, when drafts stand with the chance `share`."""
    source, given = np.random.default_rng(0), list[int]()
    for _ in range(steps):
        wanted = gauge.choose_num_drafts(np.array(rows), np.full(len(rows), arrival))
        right = source.random((len(rows), _MOST)) < share
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), wanted)
        gauge.record(np.array(rows), wanted, wanted, accepted)
        gauge.count_steps(1)
        given.append(int(wanted.sum()))
    return given


def test_drafts_that_stand_are_worth_as_many_as_there_may_be() -> None:
    assert play(DraftGauge(1, _MOST, StepCost(16.0)), 1.0, [0], 1)[-1] == _MOST


def test_fewer_are_worth_it_where_fewer_stand_and_where_rows_cost() -> None:
    def settled(share: float, fixed: float, sessions: int = 1, draft: float = 0.0) -> float:
        gauge = DraftGauge(32, _MOST, StepCost(fixed, draft))
        return sum(play(gauge, share, list(range(sessions)), 1, 400)[200:]) / (200 * sessions)

    assert settled(0.9, 16.0) > settled(0.5, 16.0) > 0
    assert settled(0.6, 16.0) > settled(0.6, 1.0) == 0, "a step of near weights costs by its rows"
    assert settled(0.6, 16.0) > settled(0.6, 16.0, sessions=32) == 0, "many sessions share what is read"
    assert settled(0.6, 16.0) > settled(0.6, 16.0, draft=0.5), "layers that draft cost as well"


def test_where_nothing_stands_a_session_rests_and_later_ones_do_not_even_try() -> None:
    gauge = DraftGauge(2, _MOST, StepCost(4.0))
    first = play(gauge, 0.0, [0], 1, 500)
    assert 0 < sum(first) < 60
    assert not any(first[60:]), "until the request ends"
    assert sum(play(gauge, 0.0, [0], 2, 500)) + sum(play(gauge, 0.0, [1], 3, 500)) <= 12
    play(gauge, 0.0, [0], 2, 600)
    assert sum(play(gauge, 1.0, [1], 4, 100)) > 100, "what was learned is forgotten from time to time"


def test_other_weights_are_given_another_chance() -> None:
    gauge = DraftGauge(1, _MOST, StepCost(4.0))
    play(gauge, 0.0, [0], 1)
    gauge.reset()
    assert sum(play(gauge, 1.0, [0], 2)) > 200


def test_of_a_request_that_begins_little_is_known_until_some_drafts_were_seen() -> None:
    gauge, row = DraftGauge(1, _MOST, StepCost(16.0)), np.array([0])
    play(gauge, 1.0, [0], 1, 1)
    assert not gauge.is_calibrated(row)
    play(gauge, 1.0, [0], 1, 20)
    assert gauge.is_calibrated(row)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_more_sessions_in_a_step_never_want_more_drafts(share: float) -> None:
    gauge = DraftGauge(32, _MOST, StepCost(8.0))
    play(gauge, share, [0], 1, 20)
    wanted: list[int] = []
    for count in range(1, 32):
        gauge._paused[:] = False
        wanted.append(int(gauge.choose_num_drafts(np.arange(count), np.ones(count, dtype=np.int64))[0]))
    assert wanted == sorted(wanted, reverse=True)
    assert wanted[0] > wanted[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("source", ["lookup", "layers"])
def test_an_engine_leaves_drafts_that_never_stand_and_samples_the_same(kernels: str, source: str) -> None:
    model = small_model(3, max_positions=512)
    layers = MtpDrafts(draft_layers(model), 2)
    drafts = NgramLookup(4, longest=1, shortest=1) if source == "lookup" else layers
    said: list[list[list[int]]] = []
    for tried in (None, drafts):
        engine = small_engine(model, kernels=kernels, drafts=tried, max_tokens=400)  # type: ignore[arg-type]
        clients = [Client(f"s{number}", number) for number in range(3)]
        for client in clients:
            client.ask(engine, prompt(10, 0), max_tokens=300)
        drain(engine, clients)
        said.append([list(client.tokens) for client in clients])
        if tried is not None:
            tries = kernels == "eager"  # native steps of a small model cost little beside their rows
            assert tries == (engine.counters.drafted_tokens > 0)
            assert engine.counters.drafted_tokens < 100
            before = engine.counters.drafted_tokens
            serve(engine, model, 1)
            clients[0].ask(engine, prompt(5, 1), max_tokens=50)
            drain(engine, clients)
            assert not tries or engine.counters.drafted_tokens > before, "other weights get another chance"
    assert said[0] == said[1]


def test_what_steps_cost_is_known_of_every_kind_of_kernels() -> None:
    model, layers = small_model(), draft_layers(small_model())
    assert step_cost("native", model, None) == StepCost(0.3)
    assert step_cost("gpu", model, None).fixed > step_cost("eager", model, None).fixed > 1
    assert 0 < step_cost("native", model, layers).draft < 1
