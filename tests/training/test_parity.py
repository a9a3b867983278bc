from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.model.kernels.invariant import InvariantOps
from etude.training.parity import choose_sequences, compare_logprobs
from tests.inference.builders import needs_compiler
from tests.model.builders import small_model
from tests.training.builders import Rollouts, rl_config, trainer_of


def rows(*values: float) -> np.ndarray:
    return np.array([0.0, *values], dtype=np.float32)


def test_figures_are_those_of_the_definition_over_all_tokens_but_the_first() -> None:
    trainer, engine = [rows(-1.0, -2.0), rows(-0.5)], [rows(-1.25, -2.0), rows(-0.75)]
    figures = compare_logprobs(trainer, engine)
    expected = [math.exp(d) - 1 - d for d in (0.25, 0.0, 0.25)]
    assert figures.k3 == pytest.approx(sum(expected) / 3, rel=1e-12)
    assert (figures.max, figures.p99) == (0.25, 0.25)
    assert figures.differing == pytest.approx(2 / 3)
    assert (figures.num_tokens, figures.num_sequences) == (3, 2)
    assert not figures.exact


def test_k3_tells_the_sides_apart() -> None:
    likelier = compare_logprobs([rows(-1.0)], [rows(-3.0)]).k3
    less_likely = compare_logprobs([rows(-3.0)], [rows(-1.0)]).k3
    assert likelier == pytest.approx(math.exp(2) - 3)
    assert less_likely == pytest.approx(math.exp(-2) + 1)


def test_tiny_differences_are_not_lost_to_rounding() -> None:
    figures = compare_logprobs([rows(-1.0)], [np.nextafter(rows(-1.0), -2, dtype=np.float32)])
    assert 0 < figures.k3 < 1e-13
    assert not figures.exact
    assert figures.passes(1e-3)


def test_equal_bits_are_exact_and_pass() -> None:
    figures = compare_logprobs([rows(-1.0, -2.5)], [rows(-1.0, -2.5)])
    assert figures.exact
    assert (figures.k3, figures.p99, figures.max) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_what_is_not_finite_never_passes(value: float) -> None:
    assert not compare_logprobs([rows(value, -1.0)], [rows(-2.0, -1.0)]).passes(1e30)
    assert not compare_logprobs([rows(-2.0)], [rows(value)]).passes(1e30)


def test_a_difference_beyond_any_exponential_fails_and_raises_nothing() -> None:
    assert not compare_logprobs([rows(0.0)], [rows(-5_000.0)]).passes(1e30)


def test_nothing_to_compare_is_no_difference() -> None:
    figures = compare_logprobs([rows()], [rows()])
    assert (figures.num_tokens, figures.k3) == (0, 0.0)
    assert compare_logprobs([], []).exact


@given(
    lengths=st.lists(st.integers(0, 60), max_size=20),
    num_sequences=st.integers(0, 12),
    max_tokens=st.integers(16, 200),
)
def test_chosen_sequences_are_beginnings_in_order_within_the_budget(
    lengths: list[int], num_sequences: int, max_tokens: int
) -> None:
    candidates = [np.full(length, number, dtype=np.int32) for number, length in enumerate(lengths)]
    chosen = choose_sequences(candidates, num_sequences, max_tokens)
    usable = [tokens for tokens in candidates if len(tokens) > 1]
    assert len(chosen) == min(num_sequences, len(usable), max_tokens // 2)
    assert all(len(tokens) > 1 for tokens in chosen)
    assert sum(map(len, chosen)) <= max_tokens
    numbers = [int(tokens[0]) for tokens in chosen]
    assert numbers == sorted(set(numbers))
    whole = sum(len(candidates[number]) for number in numbers)
    if whole > max_tokens:
        assert sum(map(len, chosen)) >= max_tokens - len(chosen), "the budget is used"
    else:
        assert [len(tokens) for tokens in chosen] == [len(candidates[number]) for number in numbers]


@needs_compiler
@pytest.mark.parametrize("micro_batch_tokens", [1, 45, 8192])
def test_an_invariant_step_has_the_sampled_bits_at_any_size_of_micro_batch(micro_batch_tokens: int) -> None:
    rollouts = Rollouts(small_model())
    rollouts.model.ops = InvariantOps()
    config = rl_config(router_replay="off", micro_batch_tokens=micro_batch_tokens)
    trainer = trainer_of(config, rollouts)
    trainer.model.ops = InvariantOps()
    metrics = trainer.step([rollouts.group([1.0, 0.0, 0.5, 0.25])])
    assert metrics["parity_max"] == 0.0
    assert metrics["parity_k3"] == 0.0
