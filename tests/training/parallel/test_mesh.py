"""Two and four processes against one: losses, gradients, weights."""

from __future__ import annotations

import numpy as np
import pytest

from etude.config.parallel import ParallelConfig
from etude.model.scoring import score_sequences
from etude.training.parallel.ranks import Share
from tests.model.builders import random_tokens, small_model
from tests.training.parallel.bodies import gradients_of, losses_and_gradients, plan_of, whole_weights
from tests.training.parallel.spawning import on_ranks

Gradients = dict[str, np.ndarray]


def _one_process(order: list[list[int]], replay: bool = False) -> tuple[float, Gradients]:
    model = small_model(0)
    loss = gradients_of(model, [Share(tuple(batch)) for batch in order], replay)
    return loss, {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def _assert_close(ours: Gradients, theirs: Gradients, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = np.abs(ours[name] - gradient).max() / np.abs(gradient).max()
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2}])
def test_two_ranks_add_up_bit_for_bit_what_one_process_does(sizes: dict[str, int]) -> None:
    plan = [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    loss, gradients = _one_process([plan[0][0], plan[1][0]])
    for rank_loss, ours in on_ranks(losses_and_gradients, ParallelConfig(ranks=2, **sizes), plan):
        assert rank_loss == loss
        _assert_close(ours, gradients, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"fsdp": 4}])
def test_four_ranks_add_up_bit_for_bit_what_one_process_does(sizes: dict[str, int]) -> None:
    plan = [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    loss, gradients = _one_process([batches[0] for batches in plan])
    for rank_loss, ours in on_ranks(losses_and_gradients, ParallelConfig(ranks=4, **sizes), plan):
        assert rank_loss == loss
        _assert_close(ours, gradients, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 2, "expert": 2},
        {"ranks": 4, "expert": 4},
        {"ranks": 4, "fsdp": 2, "expert": 2},
        {"ranks": 4, "fsdp": 2},
        {"ranks": 4, "expert": 2},
    ],
)
def test_losses_and_gradients_are_those_of_one_process(sizes: dict[str, int], replay: bool) -> None:
    config = ParallelConfig(**sizes)
    plan = plan_of(config.ranks // config.context)
    loss, gradients = _one_process([batch for batches in plan for batch in batches], replay)
    for rank_loss, ours in on_ranks(losses_and_gradients, config, plan, replay):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        _assert_close(ours, gradients, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ranks": 2, "fsdp": 2}, {"ranks": 4, "fsdp": 2, "expert": 2}])
def test_whole_weights_come_out_and_go_in_again(sizes: dict[str, int]) -> None:
    (expected,) = score_sequences(small_model(0), [random_tokens(20, 3)])
    for same, replaced, (scores,) in on_ranks(whole_weights, ParallelConfig(**sizes)):
        assert same
        assert replaced
        np.testing.assert_allclose(scores, expected, atol=1e-5)
