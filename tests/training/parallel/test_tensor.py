"""Ranks that divide heads, inner widths and the vocabulary, against one process."""

from __future__ import annotations

import numpy as np
import pytest

from etude.config.parallel import ParallelConfig
from tests.training.parallel.bodies import Gradients, plan_of
from tests.training.parallel.dividing import Found, Task, find_all, find_alone
from tests.training.parallel.spawning import on_ranks

LOSS_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}
GRADIENT_TOLERANCE = {"float32": 2e-5, "bfloat16": 0.05}
"""Of a parameter's largest gradient."""
WEIGHT_TOLERANCE = 1e-4
"""Of weights that one step has moved by 5e-4 (AdamW) or 2e-2 (Muon)."""


def _assert_close(ours: Gradients, theirs: Gradients, tolerance: float, absolute: bool = False) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        scale = 1.0 if absolute else np.abs(value).max()
        error = np.abs(ours[name] - value).max() / scale
        assert error <= tolerance, f"{name}: {error}"


def _assert_found(ours: Found, alone: Found, task: Task) -> None:
    tolerance = LOSS_TOLERANCE[task.dtype]
    assert ours.loss == pytest.approx(alone.loss, rel=tolerance)
    assert ours.entropy == pytest.approx(alone.entropy, rel=tolerance)
    assert ours.norm == pytest.approx(alone.norm, rel=10 * tolerance)
    if task.dtype == "float32":
        np.testing.assert_allclose(ours.logits, alone.logits, rtol=1e-4, atol=1e-4)
    _assert_close(ours.gradients, alone.gradients, GRADIENT_TOLERANCE[task.dtype])
    if task.dtype == "float32":
        _assert_close(ours.weights, alone.weights, WEIGHT_TOLERANCE, absolute=True)


def _compare(config: ParallelConfig, tasks: list[Task]) -> None:
    alone = [find_alone(task) for task in tasks]
    for rank in on_ranks(find_all, config, tasks):
        for ours, theirs, task in zip(rank, alone, tasks, strict=True):
            _assert_found(ours, theirs, task)


@pytest.mark.slow
def test_two_ranks_find_what_one_process_does_for_every_architecture() -> None:
    plan = plan_of(1, per_batch=4)
    _compare(
        ParallelConfig(ranks=2, tensor=2),
        [
            Task("dense", plan, matrices="muon"),
            Task("biased", plan),
            Task("mixture", plan, matrices="muon", replay=True),
            Task("latent", plan, matrices="muon", distribution=True),
            Task("mixture", plan, recompute=True),
            Task("dense", plan_of(1, per_batch=8), bounded=True),
            Task("dense", plan, "bfloat16"),
            Task("mixture", plan, "bfloat16", replay=True),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "fsdp": 2},
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "context": 2},
    ],
    ids=str,
)
def test_four_ranks_divide_the_rest_in_any_other_way(sizes: dict[str, int]) -> None:
    config = ParallelConfig(ranks=4, **sizes)
    plan = plan_of(config.replicate * config.fsdp * config.expert, per_batch=2)
    tasks = [Task("mixture", plan, matrices="muon"), Task("mixture", plan, replay=True, recompute=True)]
    if config.tensor == 2:
        tasks.append(Task("latent", plan, matrices="muon"))
    if config.expert == 1 and config.tensor == 2:
        tasks.append(Task("dense", plan, matrices="muon"))
    _compare(config, tasks)
