"""The adapter benchmark at small size: both methods train, and adapters train few parameters."""

from __future__ import annotations

import adapters
import pytest
import torch
from adapters import QUICK, VOCAB, Method

from etude.config import AdapterConfig, OptimizerConfig
from etude.model import build_model
from etude.model.lora import Adapters
from etude.training.optimizer import Optimizer


@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_moves_the_model_however_much_of_it_is_trained(rank: int) -> None:
    model = build_model(QUICK, VOCAB)
    model.initialise(0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapted = Adapters(model, AdapterConfig(rank=rank)) if rank else None
    optimizer = Optimizer(adapted or model, OptimizerConfig(warmup_steps=0), 10)
    for _ in range(2):
        adapters.step(model, optimizer, 16)
    if adapted is not None:
        adapted.merge()
    changed = {
        name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert ("embedding" in changed) == (rank == 0)
    assert {"blocks.0.qkv", "blocks.1.mlp.down"} <= changed


def test_ways_are_told_apart_in_the_figures() -> None:
    methods = [Method(optimizer, rank) for optimizer in ("adamw", "muon") for rank in (0, 16)]
    assert [method.name for method in methods] == ["adamw_all", "adamw_rank16", "muon_all", "muon_rank16"]
