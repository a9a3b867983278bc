"""An RL trainer on two ranks against one process: the same updates, files and errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from etude.config import AdapterConfig, EngineConfig, RunConfig
from etude.config.parallel import ParallelConfig
from etude.controller.engines import make_snapshots
from etude.controller.models import open_model
from etude.controller.ranks import RankedTrainer, open_trainer
from etude.errors import CheckpointError, ConfigError, RankError
from etude.model import LanguageModel
from etude.model.huggingface import outline_model, read_fields, save_model
from etude.records import Group, SamplingParams
from etude.training import RlTrainer
from etude.training.checkpoints.saving import has_checkpoint
from etude.weights import MemoryWeights
from tests.model.builders import small_model
from tests.training.builders import Rollouts, as_group, rl_config
from tests.training.pretraining.builders import tiny_tokenizer

Opened = RlTrainer | RankedTrainer


def _model(seed: int, **changes: Any) -> LanguageModel:
    """With as many key heads as two ranks divide."""
    return small_model(seed, num_kv_heads=2, **changes)


@contextmanager
def _open(
    rollouts: Rollouts, directory: Path, sizes: dict[str, int], seed: int = 0, **options: Any
) -> Iterator[Opened]:
    run = RunConfig.model_construct(
        name="run",
        rl=rl_config(**options),
        parallel=ParallelConfig.model_validate({"timeout_s": 60.0} | sizes),
    )
    weights = MemoryWeights()
    with open_trainer(_model(seed), run, weights, rollouts.blobs.get, directory) as trainer:
        yield trainer


def _groups(rollouts: Rollouts) -> list[Group]:
    return [rollouts.group([1.0, 0.0, 1.0, 0.0]), rollouts.group([0.0, 1.0])]


def _assert_close(ours: nn.Module, theirs: nn.Module, atol: float) -> None:
    moved = 0.0
    fresh = _model(0)
    for (name, p), q, start in zip(
        ours.named_parameters(), theirs.parameters(), fresh.parameters(), strict=True
    ):
        torch.testing.assert_close(p, q, atol=atol, rtol=0, msg=name)
        moved = max(moved, float((q - start).detach().abs().max()))
    assert moved > 100 * atol, "a test of nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"ranks": 2}, {"ranks": 2, "fsdp": 2}, {"ranks": 2, "expert": 2}, {"ranks": 2, "tensor": 2}]
)
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_ranks_take_the_steps_of_one_process(sizes: dict[str, int], rule: str, tmp_path: Path) -> None:
    """AdamW divides by a gradient's size, and so enlarges the rounding of those that are nearly 0: SGD-like
    rates of noise stay under 1e-4 where weights move by 1e-2."""
    rollouts = Rollouts(_model(0))
    steps = [_groups(rollouts), _groups(rollouts)]
    options: dict[str, Any] = {
        "loss": {"kl_weight": 0.05},
        "optimizer": {"matrix_optimizer": rule, "learning_rate": 3e-3, "matrix_learning_rate": 3e-3},
        "updates_per_step": 2,
    }
    results: list[tuple[LanguageModel, list[dict[str, float]], str]] = []
    for one in ({"ranks": 1}, sizes):
        with _open(rollouts, tmp_path, one, **options) as trainer:
            metrics = [dict(trainer.step(groups)) for groups in steps]
            manifest = trainer.publish()
            model = trainer.whole_model()
            results.append((model, metrics, manifest.version.digest))
            assert trainer.version == manifest.version
    (model, metrics, _), (ranked, ranked_metrics, _) = results
    _assert_close(ranked, model, 1e-4)
    for ours, theirs in zip(ranked_metrics, metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("grad_norm", "train_tokens", "skipped_updates", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key


@pytest.mark.slow
def test_ranks_that_read_their_parts_of_a_checkpoint_take_the_step_of_one_process(tmp_path: Path) -> None:
    rollouts = Rollouts(_model(0))
    steps, checkpoint = [_groups(rollouts), _groups(rollouts)], tmp_path / "initial"
    save_model(_model(0), checkpoint)
    options: dict[str, Any] = {
        "loss": {"kl_weight": 0.05},
        "optimizer": {"learning_rate": 3e-3, "matrix_learning_rate": 3e-3},
        "updates_per_step": 2,
    }
    results: list[tuple[LanguageModel, list[float]]] = []
    for sizes in ({"ranks": 1}, {"ranks": 2, "fsdp": 2}):
        run = RunConfig.model_construct(
            name="run",
            rl=rl_config(**options),
            parallel=ParallelConfig.model_validate({"timeout_s": 60.0} | sizes),
            device="cpu",
            dtype="float32",
        )
        model = open_model(run, checkpoint)
        assert isinstance(model, LanguageModel)
        assert model.embedding.is_meta == (sizes["ranks"] > 1)
        with open_trainer(model, run, MemoryWeights(), rollouts.blobs.get, tmp_path) as trainer:
            norms = [trainer.step(groups)["grad_norm"] for groups in steps]
            trainer.publish()
            results.append((trainer.whole_model(), norms))
    (alone, norms), (ranked, ranked_norms) = results
    _assert_close(ranked, alone, 1e-4)
    assert ranked_norms == pytest.approx(norms, rel=1e-3)


@pytest.mark.slow
def test_one_process_goes_on_from_what_two_ranks_saved_and_the_other_way_round(tmp_path: Path) -> None:
    rollouts = Rollouts(_model(0))
    before, after = _groups(rollouts), _groups(rollouts)
    options: dict[str, Any] = {"optimizer": {"matrix_optimizer": "muon", "learning_rate": 3e-3}}
    with _open(rollouts, tmp_path, {"ranks": 1}, **options) as trainer:
        trainer.step(before)
        trainer.step(after)
        expected = trainer.whole_model()
    for first, second in (({"ranks": 2, "fsdp": 2}, {"ranks": 1}), ({"ranks": 1}, {"ranks": 2, "expert": 2})):
        directory = tmp_path / f"saved-by-{first['ranks']}"
        with _open(rollouts, tmp_path, first, **options) as trainer:
            trainer.step(before)
            trainer.save(directory, {"more": 1})
        with _open(rollouts, tmp_path, second, seed=3, **options) as trainer:
            trainer.restore(directory)
            assert trainer.version.step == 1
            trainer.step(after)
            _assert_close(trainer.whole_model(), expected, 1e-4)


@pytest.mark.slow
def test_adapters_that_two_ranks_saved_are_taken_up_by_one_and_the_other_way_round(tmp_path: Path) -> None:
    rollouts = Rollouts(_model(0))
    groups = _groups(rollouts)
    options: dict[str, Any] = {"adapter": AdapterConfig(rank=2)}
    for first, second in ((2, 1), (1, 2)):
        directory = tmp_path / f"saved-by-{first}"
        with _open(rollouts, tmp_path, {"ranks": first}, **options) as trainer:
            trainer.step(groups)
            trainer.save(directory)
            assert trainer.adapters is not None
            saved = {name: factor.clone() for name, factor in trainer.adapters.state_dict().items()}
        assert not (directory / "config.json").exists(), "no model, adapters alone"
        with _open(rollouts, tmp_path, {"ranks": second}, **options) as trainer:
            trainer.restore(directory)
            assert trainer.version.step == 1
            assert trainer.adapters is not None
            for name, factor in trainer.adapters.state_dict().items():
                assert torch.equal(factor, saved[name]), name
            trainer.step(groups)


@pytest.mark.slow
def test_ranks_score_as_one_process_and_twice_the_same_run_gives_equal_bits(tmp_path: Path) -> None:
    rollouts = Rollouts(_model(0))
    groups = _groups(rollouts)
    tokens = [rollouts.segment(15).tokens, rollouts.segment(9).tokens]
    with _open(rollouts, tmp_path, {"ranks": 1}) as trainer:
        expected = trainer.score(tokens)
    digests: list[str] = []
    for _ in range(2):
        with _open(rollouts, tmp_path, {"ranks": 2, "fsdp": 2}) as trainer:
            for ours, theirs in zip(trainer.score(tokens), expected, strict=True):
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
            trainer.step(groups)
            digests.append(trainer.publish().version.digest)
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_what_is_refused_changes_nothing_and_a_lost_rank_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    rollouts = Rollouts(_model(0))
    groups = _groups(rollouts)
    saved, later = tmp_path / "saved", tmp_path / "later"
    truncated = as_group([rollouts.member(1.0), rollouts.member(0.0, sampling=SamplingParams(top_p=0.9))])
    with _open(rollouts, tmp_path, {"ranks": 2, "fsdp": 2}) as trainer:
        assert isinstance(trainer, RankedTrainer)
        with pytest.raises(ConfigError):
            trainer.step([truncated])
        with pytest.raises(CheckpointError):
            trainer.restore(tmp_path / "nothing")
        assert trainer.version.step == 0
        trainer.step(groups)
        trainer.save(saved)
        os.kill(trainer._team._processes[0].pid or 0, signal.SIGKILL)
        with pytest.raises(RankError):
            trainer.step(groups)
        with pytest.raises(RankError):
            trainer.save(later)
    assert has_checkpoint(saved)
    assert not has_checkpoint(later)


def test_other_architectures_are_refused_before_anything_starts(tmp_path: Path) -> None:
    rollouts = Rollouts(_model(0))
    model: Any = nn.Linear(3, 3)
    run = RunConfig(name="run", rl=rl_config(), parallel=ParallelConfig(ranks=2))
    with (
        pytest.raises(ConfigError, match=r"parallel\.ranks"),
        open_trainer(model, run, MemoryWeights(), rollouts.blobs.get, tmp_path),
    ):
        pass


def test_a_model_larger_than_the_machine_is_refused_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(_model(0), tmp_path)
    model = outline_model(read_fields(tmp_path / "config.json"), torch.float32)
    model.unread = tmp_path
    run = RunConfig.model_construct(
        name="run",
        rl=rl_config(),
        parallel=ParallelConfig(ranks=2, fsdp=2),
        device="cpu",
        dtype="float32",
        engine=EngineConfig(),
    )
    monkeypatch.setattr("etude.model.huggingface.checkpoint.total_memory_bytes", lambda: 1000)
    with (
        pytest.raises(CheckpointError, match="memory"),
        open_trainer(model, run, MemoryWeights(), Rollouts(_model(0)).blobs.get, tmp_path),
    ):
        pass
    with pytest.raises(CheckpointError, match="memory"):
        make_snapshots(tmp_path / "snapshots", tiny_tokenizer(), model)
