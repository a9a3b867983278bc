"""Runs that train adapters by configuration: published merged, stored alone."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.controller.train import ADAPTER, FINAL, LATEST
from etude.model.loading import load_any_model
from etude.observe.metrics import read_metrics
from etude.training.checkpoints import load_state
from tests.controller.running import run_here, tiny_config
from tests.controller.test_vllm_run import checkpoint, small_model
from tests.inference.builders import needs_compiler


@needs_compiler
def test_a_run_trains_adapters_and_publishes_the_merged_weights(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", small_model)
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
    assert changed <= {"qkv", "out", "gate_up", "down"}
