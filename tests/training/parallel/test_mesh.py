"""Two and four processes against one: losses, gradients, weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etude.config.parallel import ParallelConfig
from etude.model.huggingface import save_model
from etude.model.scoring import score_sequences
from etude.training.parallel.ranks import Share
from tests.model.builders import random_tokens
from tests.training.parallel.bodies import (
    LONG,
    SHORT,
    Gradients,
    damaged_weights,
    gradients_of,
    latent_gradients,
    latent_model,
    losses_and_gradients,
    model_of,
    next_token_trainer_of,
    next_token_weights,
    plan_of,
    read_weights,
    receive_weights,
    whole_weights,
)
from tests.training.parallel.spawning import on_ranks

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-5
"""Of a parameter's largest gradient, in float32."""


def _one_process(
    order: list[list[int]], lengths: tuple[int, ...] = SHORT, replay: bool = False, balance: bool = False
) -> tuple[float, Gradients]:
    model = model_of(0)
    loss = gradients_of(model, [Share(tuple(batch)) for batch in order], lengths, replay, balance)
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
@pytest.mark.parametrize("sizes", [{"fsdp": 4}])
def test_four_ranks_add_up_bit_for_bit_what_one_process_does(sizes: dict[str, int]) -> None:
    plan = [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    loss, gradients = _one_process([batches[0] for batches in plan])
    for rank_loss, ours in on_ranks(losses_and_gradients, ParallelConfig(ranks=4, **sizes), plan):
        assert rank_loss == loss
        _assert_close(ours, gradients, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "replay"),
    [
        ({"ranks": 4, "expert": 4}, False),
        ({"ranks": 4, "context": 4}, True),
        ({"ranks": 4, "fsdp": 2, "expert": 2}, True),
        ({"ranks": 4, "fsdp": 2, "context": 2}, False),
        ({"ranks": 4, "expert": 2, "context": 2}, True),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(sizes: dict[str, int], replay: bool) -> None:
    config = ParallelConfig(**sizes)
    lengths = LONG if config.context > 1 else SHORT
    plan = plan_of(config.ranks // config.context, per_batch=2)
    order = [batch for batches in plan for batch in batches]
    loss, gradients = _one_process(order, lengths, replay)
    for rank_loss, ours in on_ranks(losses_and_gradients, config, plan, lengths, replay):
        assert rank_loss == pytest.approx(loss, rel=LOSS_TOLERANCE)
        _assert_close(ours, gradients, GRADIENT_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ranks": 2, "context": 2}])
def test_the_balancing_loss_of_a_micro_batch_is_the_same(sizes: dict[str, int]) -> None:
    config = ParallelConfig(**sizes)
    plan = plan_of(config.ranks // config.context)
    order = [batch for batches in plan for batch in batches]
    loss, gradients = _one_process(order, LONG, balance=True)
    for rank_loss, ours in on_ranks(losses_and_gradients, config, plan, LONG, False, True):
        assert rank_loss == pytest.approx(loss, rel=LOSS_TOLERANCE)
        _assert_close(ours, gradients, GRADIENT_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ranks": 4, "fsdp": 2, "expert": 2}])
def test_activation_checkpointing_computes_and_exchanges_the_same_again(sizes: dict[str, int]) -> None:
    config = ParallelConfig(**sizes)
    plan = plan_of(config.ranks // config.context, per_batch=2)
    order = [batch for batches in plan for batch in batches]
    loss, gradients = _one_process(order, LONG, replay=True, balance=True)
    for rank_loss, ours in on_ranks(losses_and_gradients, config, plan, LONG, True, True, True):
        assert rank_loss == pytest.approx(loss, rel=LOSS_TOLERANCE)
        _assert_close(ours, gradients, GRADIENT_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype", "tolerance"),
    [
        ({"ranks": 4, "fsdp": 2, "expert": 2}, "bfloat16", 0.05),
        ({"ranks": 2, "context": 2}, "float32", GRADIENT_TOLERANCE),
    ],
)
def test_latent_attention_and_shared_experts_are_divided_too(
    sizes: dict[str, int], dtype: str, tolerance: float
) -> None:
    config, model = ParallelConfig(**sizes), latent_model(dtype)
    plan = plan_of(config.ranks // config.context, per_batch=4 if config.context > 1 else 2)
    loss = gradients_of(model, [Share(tuple(batch)) for batches in plan for batch in batches])
    gradients = {n: p.grad.float().numpy() for n, p in model.named_parameters() if p.grad is not None}
    for rank_loss, ours in on_ranks(latent_gradients, config, plan, dtype):
        assert rank_loss == pytest.approx(loss, rel=1e-6 if dtype == "float32" else 1e-3)
        _assert_close(ours, gradients, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"ranks": 4, "fsdp": 2, "expert": 2}, {"ranks": 4, "fsdp": 2, "tensor": 2}],
)
def test_whole_weights_come_out_and_go_in_again(sizes: dict[str, int]) -> None:
    expected, other = (score_sequences(model_of(seed), [random_tokens(20, 3)])[0] for seed in (0, 5))
    for same, replaced, (scores,), (frozen,) in on_ranks(whole_weights, ParallelConfig(**sizes)):
        assert same
        assert replaced
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        np.testing.assert_allclose(frozen, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"ranks": 3, "fsdp": 3}, {"ranks": 4, "expert": 2, "tensor": 2}],
)
def test_each_rank_reads_its_own_part_of_a_checkpoint(sizes: dict[str, int], tmp_path: Path) -> None:
    model = model_of(0)
    save_model(model, tmp_path)
    (expected,) = score_sequences(model, [random_tokens(20, 3)])
    for was_read, whole, (scores,) in on_ranks(read_weights, ParallelConfig(**sizes), str(tmp_path)):
        assert was_read
        for name, parameter in model.named_parameters():
            np.testing.assert_array_equal(whole[name], parameter.detach().numpy(), err_msg=name)
        np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.slow
def test_only_the_first_rank_needs_the_whole_model() -> None:
    model = model_of(0)
    for as_said, whole in on_ranks(receive_weights, ParallelConfig(ranks=2, fsdp=2)):
        assert as_said
        for name, parameter in model.named_parameters():
            np.testing.assert_array_equal(whole[name], parameter.detach().numpy(), err_msg=name)


@pytest.mark.slow
def test_a_part_that_one_rank_cannot_read_is_an_error_of_all(tmp_path: Path) -> None:
    save_model(model_of(0), tmp_path)
    first, last = on_ranks(damaged_weights, ParallelConfig(ranks=2, fsdp=2), str(tmp_path))
    assert first == last
    assert "config.json" in first


@pytest.mark.slow
def test_experts_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"parallel\.expert: must divide the number of experts"):
        on_ranks(losses_and_gradients, ParallelConfig(ranks=3, expert=3), plan_of(3))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ranks": 4, "expert": 2, "context": 2}])
def test_next_token_training_takes_the_steps_of_one_process(sizes: dict[str, int]) -> None:
    model, steps = model_of(0), 3
    trainer = next_token_trainer_of(model)
    expected = [trainer.step()["loss"] for _ in range(steps)]
    assert expected[0] - expected[-1] > 1e-3, "a test of nothing"
    for weights, losses in on_ranks(next_token_weights, ParallelConfig(**sizes), steps):
        assert losses == pytest.approx(expected, rel=1e-4)
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(weights[name], parameter.detach().numpy(), atol=2e-4, err_msg=name)


def test_sizes_that_do_not_multiply_to_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="context x tensor = 2 x 3 x 1 x 1 = 6"):
        ParallelConfig(ranks=4, fsdp=2, expert=3)
    assert ParallelConfig(ranks=12, fsdp=2, expert=3).replicate == 2
