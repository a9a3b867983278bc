"""Runs that train adapters by configuration: published and stored without the base, merged at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.controller.evaluate import FINAL
from etude.controller.train import ADAPTER
from etude.controller.training_part import LATEST
from etude.model import LanguageModel, build_model
from etude.model.loading import load_any_model
from etude.model.lora import Factors
from etude.observe.metrics import read_metrics
from etude.training.checkpoints.saving import load_state
from tests.controller.running import run_here, tiny_config
from tests.controller.test_vllm_run import checkpoint
from tests.inference.builders import needs_compiler
from tests.model.builders import small_config


def routed_model(vocab_size: int) -> LanguageModel:
    model = build_model(small_config(max_positions=2048), vocab_size)
    model.initialise(0)
    return model


class MovedFactors(Factors):
    """As if they had been trained: with a tiny model no group may have a signal."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__(weight, rank, generator)
        self.left.data.normal_(0.0, 0.05, generator=generator)


@needs_compiler
def test_a_run_trains_adapters_and_its_engine_computes_the_trainers_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.model.lora.Factors", MovedFactors)
    initial = checkpoint(tmp_path / "initial", routed_model)
    config = tiny_config(
        tmp_path,
        initial_checkpoint=str(initial),
        numerics="invariant",
        agent={"max_message_tokens": 8},
        rl={"adapter": {"rank": 2, "alpha": 8.0}, "groups_per_step": 1},
        evaluation={"num_tasks": 1},
        parity={"num_sequences": 2, "max_tokens": 64},
    )
    run, report = run_here(config)
    assert report["rl_steps"] == 2
    checks = [row for row in read_metrics(run.metrics_file) if row["kind"] == "parity"]
    assert len(checks) == 3 and all(row["differing"] == 0 for row in checks)
    state = load_state(run.checkpoints / LATEST)
    assert state is not None and set(state["optimizer"]["adamw"]) == set(state["adapters"]["factors"])
    assert not list((run.checkpoints / LATEST).glob("*.safetensors"))
    assert (run.checkpoints / ADAPTER / "adapter_model.safetensors").exists()
    before = dict(load_any_model(initial).named_parameters())
    after = dict(load_any_model(run.checkpoints / FINAL).named_parameters())
    changed = {name.rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"qkv", "out", "gate_up", "down"}
