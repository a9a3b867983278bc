"""Architectures that transformers defines, in runs: what they need, what is refused, and their experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.config import RunConfig
from etude.controller.models import check_routing, resolve_model
from etude.controller.pretraining import check_pretraining, pretrain
from etude.controller.starting import check_start
from etude.errors import ConfigError
from etude.model.loading import load_any_model
from etude.model.transformers_model import TransformersModel
from etude.observe import RunDirectory, SilentObserver, read_metrics
from tests.controller.running import run_here
from tests.controller.test_vllm_run import check_routes, checkpoint, fake_vllm, glm_model, vllm_config
from tests.model.transformers_builders import tiny_model

REMOTE = {"backend": "vllm", "vllm": {"url": "http://localhost:1"}}


def config_of(initial: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"initial_checkpoint": str(initial), **sections})


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_the_experts_of_a_mixture_are_recorded_and_replayed(replay: str, tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", glm_model)
    with fake_vllm(initial) as url:
        rl = {
            "groups_per_step": 2,
            "router_replay": replay,
            "updates_per_step": 2,
            "keep_routes": True,
            "loss": {"balance_weight": 0.01, "kind": "decoupled"},
        }
        config = vllm_config(tmp_path, initial, url, rl=rl)
        check_start(config)
        run, report = run_here(config)
    assert report["rl_steps"] == 2
    rows = read_metrics(run.metrics_file)
    assert all(row["k3"] < 1e-6 for row in rows if row["kind"] == "parity")
    check_routes(run, load_any_model(initial))


def test_our_own_engine_does_not_sample_from_them(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path, glm_model)
    with pytest.raises(ConfigError, match="an architecture that Étude implements"):
        check_start(config_of(initial))
    check_start(config_of(initial, engine=REMOTE))


def test_training_without_sampling_asks_for_no_engine(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path, glm_model)
    assert resolve_model(config_of(initial), samples=False).model.max_positions == 1024
    resolve_model(config_of(initial, rl={"stream": {"source": "elsewhere"}}))


def test_what_a_models_routers_cannot_do_is_refused() -> None:
    unknown = tiny_model("gemma4_text", enable_moe_block=True, num_experts=4, top_k_experts=2)
    for rl in ({}, {"router_replay": "r2"}, {"router_replay": "off", "loss": {"balance_weight": 0.1}}):
        with pytest.raises(ConfigError, match="neither replayed nor measured"):
            check_routing(RunConfig.model_validate({"rl": rl}), unknown)
    check_routing(RunConfig.model_validate({"rl": {"router_replay": "off"}}), unknown)
    for known in ("glm4_moe", "llama"):
        check_routing(RunConfig.model_validate({"engine": REMOTE}), tiny_model(known))


def test_replay_of_what_nobody_records_is_refused() -> None:
    engine = {"backend": "vllm", "vllm": {"url": "http://localhost:1", "record_routes": False}}
    with pytest.raises(ConfigError, match="configured to record none"):
        check_routing(RunConfig.model_validate({"engine": engine}), tiny_model("mixtral"))
    check_routing(RunConfig.model_validate({"engine": engine}), tiny_model("llama"))
    off = RunConfig.model_validate({"engine": engine, "rl": {"router_replay": "r2"}})
    check_routing(off, tiny_model("mixtral"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gemma3_text"])
def test_pre_training_goes_on_with_any_architecture(kind: str, tmp_path: Path) -> None:
    def make(vocab_size: int) -> TransformersModel:
        return tiny_model(kind, vocab_size=vocab_size, max_position_embeddings=64)

    initial = checkpoint(tmp_path / "initial", make)
    rows = [json.dumps({"text": f"def add(left):\n    return left + {number}\n"}) for number in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = config_of(
        initial,
        name="small",
        runs_directory=str(tmp_path / "runs"),
        num_threads=1,
        pretrain={
            "sources": {"sums": {"path": str(tmp_path / "sums.jsonl"), "heldout_share": 0.1}},
            "cache": str(tmp_path / "cache"),
            "num_steps": 8,
            "tokens_per_step": 256,
            "pool_tokens": 512,
        },
    )
    check_pretraining(config)
    run = RunDirectory.create(config)
    report = pretrain(config, run, SilentObserver(), resume=False)
    assert report["heldout_after"]["sums"]["loss"] < report["heldout_before"]["sums"]["loss"]
    losses = [row["balance"] for row in read_metrics(run.metrics_file) if row["kind"] == "pretrain"]
    assert all(np.isclose(loss, 0.0) == (kind == "gemma3_text") for loss in losses) and losses
    before, after = load_any_model(initial), load_any_model(run.checkpoints / "final")
    assert any(not torch.equal(p, after.get_parameter(name)) for name, p in before.named_parameters())
