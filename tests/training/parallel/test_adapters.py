"""Adapters on several ranks that each have whole weights: the gradient and the step of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.config import AdapterConfig, OptimizerConfig
from etude.config.parallel import ParallelConfig
from etude.model.lora import Adapters
from etude.training.optimizer import Optimizer
from etude.training.parallel import SingleRank
from etude.training.parallel.mesh_ranks import MeshRanks
from tests.training.parallel.bodies import LONG, Gradients, Plan, gradients_of, model_of, plan_of
from tests.training.parallel.spawning import on_ranks


def adapted_step(ranks: MeshRanks | SingleRank, plan: Plan) -> tuple[Gradients, Gradients]:
    """Gradients of the factors, summed over ranks, and the model's weights after a step with them."""
    model = model_of(0 if ranks.is_main else 1)  # rank 0's weights are those that count
    if isinstance(ranks, MeshRanks):
        ranks.place(model)
    adapters = Adapters(model, AdapterConfig(rank=3, alpha=6.0))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, clip_norm=1e9)
    optimizer = Optimizer(adapters, config, 10, ranks)
    gradients_of(model, ranks.share(plan), LONG)
    own = {name: p.grad.clone() for name, p in adapters.named_parameters() if p.grad is not None}
    summed = {name: ranks.all_reduce_(gradient).numpy() for name, gradient in own.items()}
    optimizer.step()
    adapters.merge()
    return summed, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_ranks_with_whole_weights_train_the_same_adapters() -> None:
    alone, weights = adapted_step(SingleRank(), plan_of(1))
    assert alone and max(float(np.abs(gradient).max()) for gradient in alone.values()) > 1e-2
    answers = on_ranks(adapted_step, ParallelConfig(ranks=2), plan_of(2))
    for gradients, stepped in answers:
        assert gradients.keys() == alone.keys()
        for name, gradient in gradients.items():
            scale = float(np.abs(alone[name]).max())
            np.testing.assert_allclose(gradient, alone[name], rtol=1e-3, atol=1e-5 * scale, err_msg=name)
        for name, weight in stepped.items():
            np.testing.assert_array_equal(weight, answers[0][1][name])
            np.testing.assert_allclose(weight, weights[name], rtol=1e-3, atol=2e-3, err_msg=name)
