"""The RL step with adapters: only they learn, and they go on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config import AdapterConfig, RunConfig
from etude.errors import CheckpointError
from etude.model.scoring import score_sequences
from etude.records import ADAPTER_PREFIX, TensorEntry
from etude.training import RlTrainer
from etude.weights import MemoryWeights, check_tensors, manifest, memory
from etude.weights.manifest import describe_tensor
from tests.model.builders import small_model
from tests.training.builders import Rollouts, rl_config, trainer_of

ADAPTED: dict[str, Any] = {"adapter": AdapterConfig(rank=4, alpha=16.0)}


def steps(trainer: RlTrainer, rollouts: Rollouts, count: int = 1) -> None:
    for _ in range(count):
        trainer.step([rollouts.group([1.0, 0.0, 0.0, 1.0])])


def test_a_step_moves_adapters_alone_and_with_them_the_right_log_probabilities() -> None:
    rollouts = Rollouts(small_model())
    trainer = trainer_of(rl_config(loss={"kl_weight": 0.1}, **ADAPTED), rollouts)
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    group = rollouts.group([1.0, 0.0, 0.0, 1.0])
    given = [member.segments[0].tokens for member in group.members]
    before = score_sequences(trainer.model, given)
    metrics = trainer.step([group])
    after = score_sequences(trainer.model, given)
    assert metrics["parity_max"] < 1e-5
    for sign, member, old, new in zip((1, -1, -1, 1), group.members, before, after, strict=True):
        sampled = member.segments[0].sampled
        assert sign * float((new - old)[sampled].sum()) > 0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, base[name]), name
    assert trainer.adapters is not None
    assert all(float(left.abs().max()) > 0 for _, left, _ in trainer.adapters.factors())


def test_what_is_published_names_its_adapter_and_holds_base_and_factors() -> None:
    rollouts, weights = Rollouts(small_model()), MemoryWeights()
    trainer = RlTrainer(small_model(), rl_config(**ADAPTED), "run", weights, rollouts.blobs.get)
    first = trainer.publish()
    held = weights.fetch(first)
    steps(trainer, rollouts)
    second = trainer.publish()
    fetched = weights.fetch(second)
    assert second.version.adapter == trainer.version.adapter == "run" and second.version.step == 1
    factors = {name for name in fetched if name.startswith(ADAPTER_PREFIX)}
    assert fetched.keys() - factors == dict(trainer.model.named_parameters()).keys()
    for name in fetched:
        if name in factors:
            assert fetched[name].dtype == torch.float32
            assert name.endswith(".right") or not torch.equal(fetched[name], held[name])
        else:
            assert fetched[name] is held[name], "the base is copied once"


def test_the_base_is_hashed_once_however_often_adapters_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[str] = []

    def describe(name: str, tensor: torch.Tensor, cuts: tuple[int, ...] = ()) -> TensorEntry:
        hashed.append(name)
        return describe_tensor(name, tensor, cuts)

    monkeypatch.setattr(manifest, "describe_tensor", describe)
    monkeypatch.setattr(memory, "describe_tensor", describe)
    rollouts, weights = Rollouts(small_model()), MemoryWeights()
    trainer = RlTrainer(small_model(), rl_config(**ADAPTED), "run", weights, rollouts.blobs.get)
    trainer.publish()
    assert any(not name.startswith(ADAPTER_PREFIX) for name in hashed)
    hashed.clear()
    second = trainer.publish()
    assert hashed and all(name.startswith(ADAPTER_PREFIX) for name in hashed)
    check_tensors(second, weights.fetch(second))


def test_a_restored_trainer_takes_the_same_next_step(tmp_path: Path) -> None:
    config = rl_config(loss={"kl_weight": 0.1}, **ADAPTED)
    one, two = Rollouts(small_model()), Rollouts(small_model())
    straight, broken = trainer_of(config, one), trainer_of(config, two)
    steps(straight, one, 2)
    steps(broken, two)
    broken.save(tmp_path / "latest")
    assert {file.name for file in (tmp_path / "latest").iterdir()} == {"state.pt", "digests.json"}
    resumed = trainer_of(config, two)
    resumed.restore(tmp_path / "latest")
    steps(resumed, two)
    assert resumed.version == straight.version
    assert straight.adapters is not None and resumed.adapters is not None
    for name, factor in straight.adapters.named_parameters():
        assert torch.equal(factor, resumed.adapters.get_parameter(name)), name


def test_a_checkpoint_with_adapters_is_not_one_without(tmp_path: Path) -> None:
    rollouts = Rollouts(small_model())
    trainer_of(rl_config(**ADAPTED), rollouts).save(tmp_path / "adapted")
    trainer_of(rl_config(), rollouts).save(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="has adapters"):
        trainer_of(rl_config(), rollouts).restore(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match="has no adapters"):
        trainer_of(rl_config(**ADAPTED), rollouts).restore(tmp_path / "plain")


def test_adapters_are_refused_where_weights_are_cut() -> None:
    with pytest.raises(ValueError, match="fsdp, expert and tensor must be 1"):
        RunConfig.model_validate({"rl": {"adapter": {"rank": 2}}, "parallel": {"ranks": 2, "fsdp": 2}})
