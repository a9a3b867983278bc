"""The trainer's optimiser and checkpoints take every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.config import ModelConfig
from etude.config.optimizer import OptimizerConfig
from etude.model import LanguageModel, build_model
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.records import PolicyVersion
from etude.training.checkpoints import load_checkpoint, save_checkpoint
from etude.training.optimizer import Optimizer
from etude.weights import MemoryWeights

VOCAB = 50


def _model(architecture: Any) -> LanguageModel:
    latent: dict[str, Any] = {"q_lora_rank": 24} if architecture == "deepseek_v3" else {}
    config = ModelConfig(
        architecture=architecture, tie_embeddings=False, hidden_size=32, num_layers=3, **latent
    )
    model = build_model(config, VOCAB)
    model.initialise(0)
    return model


def _take_step(model: LanguageModel, optimizer: Optimizer) -> float:
    batch = PackedSequences.pack([(np.arange(40) * 7 % VOCAB).astype(np.int32)])
    loss = -packed_logprobs(model, batch, torch.arange(1, 40))[0].mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, architecture: str, rule: Any) -> None:
    model = _model(architecture)
    config = OptimizerConfig(matrix_optimizer=rule, learning_rate=3e-3)
    optimizer = Optimizer(model, config, 20)
    losses = [_take_step(model, optimizer) for _ in range(6)]
    assert losses[-1] < losses[0] - 0.05
    assert optimizer.num_skipped == 0
    save_checkpoint(tmp_path / "c", model, {"optimizer": optimizer.state_dict()})
    loaded, state = load_checkpoint(tmp_path / "c")
    assert loaded.config == model.config and state is not None
    resumed = Optimizer(loaded, config, 20)
    resumed.load_state_dict(state["optimizer"])
    for _ in range(3):
        assert _take_step(model, optimizer) == _take_step(loaded, resumed)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_routers_bias_is_published_and_not_trained() -> None:
    model = _model("deepseek_v3")
    name = "blocks.2.experts.score_bias"
    bias = dict(model.named_parameters())[name]
    bias.data.copy_(torch.linspace(-1, 1, len(bias)))
    before = bias.detach().clone()
    optimizer = Optimizer(model, OptimizerConfig(weight_decay=0.5), 20)
    _take_step(model, optimizer)
    assert torch.equal(bias, before)
    weights = MemoryWeights()
    manifest = weights.publish(PolicyVersion("run", 0), dict(model.named_parameters()))
    assert torch.equal(weights.fetch(manifest)[name], before)
