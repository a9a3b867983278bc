"""`etude train --from-log`: a model, a log, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.agent import core_registry, open_renderer
from etude.config import AgentConfig, RunConfig, load_config
from etude.controller.recorded import RecordedSource, resolve_recorded, train_recorded
from etude.controller.train import ADAPTER, FINAL, InterruptedRunError
from etude.errors import ConfigError
from etude.model import LanguageModel
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver
from etude.records import RewardBreakdown
from etude.store.blobs import FileBlobs, MemoryBlobs, PermanentBlobs
from etude.store.trajectories import TrajectoryLog
from etude.tokens import ETUDE_TEMPLATE, Tokenizer, train_tokenizer
from etude.tokens.grammar import XmlGrammar
from etude.training import load_checkpoint, save_checkpoint
from tests.cli.commands import etude
from tests.controller.running import run_here, tiny_config
from tests.model.builders import small_config
from tests.training.builders import Rollouts
from tests.training.test_stream import group_of

NUM_GROUPS = 6


def _tokenizer() -> Tokenizer:
    names = XmlGrammar(core_registry().schemas).control_tokens()
    return train_tokenizer(["read the file"] * 4, 400, [*ETUDE_TEMPLATE.control_tokens, *names])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves: the model that RL began with, trajectories and their routes."""
    directory = tmp_path_factory.mktemp("recorded")
    tokenizer = _tokenizer()
    model = LanguageModel(small_config(max_positions=640), tokenizer.vocab_size)
    model.initialise(0)
    (directory / "checkpoints").mkdir()
    save_checkpoint(directory / "checkpoints" / "midtrained", model, write_more=tokenizer.save)
    rollouts = Rollouts(model)
    rollouts.blobs = FileBlobs(directory / "routes")  # type: ignore[assignment]
    log = TrajectoryLog(directory / "trajectories")
    for number in range(NUM_GROUPS):
        log.append([group_of(rollouts, number, (1.0, 0.0) if number != 1 else (0.0, 0.0))])
    return directory


def _config(tmp_path: Path, source: Path, **rl: Any) -> RunConfig:
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 0}
    tree = {
        "groups_per_step": 2,
        "updates_per_step": 1,
        "num_steps": 9,
        "optimizer": optimizer,
        "stream": {"source": str(source)},
    }
    return RunConfig.model_validate(
        {
            "name": "replayed",
            "runs_directory": str(tmp_path),
            "num_threads": 1,
            "device": "cpu",
            "checkpoint": {"every_s": 1e-6},
            "rl": tree | rl,
        }
    )


def _train(config: RunConfig, resume: bool = False) -> tuple[RunDirectory, dict[str, Any]]:
    config = resolve_recorded(config)
    path = Path(config.runs_directory) / config.name
    run = RunDirectory.open(path) if resume else RunDirectory.create(config)
    return run, train_recorded(config, run, SilentObserver(), resume)


def _weights(run: RunDirectory) -> torch.Tensor:
    model, _ = load_checkpoint(run.checkpoints / "final")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_run_trains_on_everything_the_log_holds_and_stops(tmp_path: Path, recorded: Path) -> None:
    run, report = _train(_config(tmp_path, recorded))
    assert (report["rl_steps"], report["trained_groups"]) == (3, 5)
    assert report["passed_groups"] == {"no_signal": 1}
    rows = read_metrics(run.metrics_file)
    assert [row["trained_groups"] for row in rows if row["kind"] == "rl"] == [2, 2, 1]
    assert rows[0]["lag_unknown_tokens"] > 0, "another lineage sampled"
    assert rows[0]["k3"] < 1e-6, "the model that sampled begins"
    before, _ = load_checkpoint(recorded / "checkpoints" / "midtrained")
    flat = torch.cat([parameter.detach().flatten() for parameter in before.parameters()])
    assert (_weights(run) - flat).abs().max() > 1e-4
    assert Tokenizer.load(run.checkpoints / "final").digest == _tokenizer().digest


def test_a_run_with_adapters_ends_with_the_merged_model_and_the_adapters(
    tmp_path: Path, recorded: Path
) -> None:
    run, _ = _train(_config(tmp_path, recorded, num_steps=1, adapter={"rank": 2, "alpha": 8.0}))
    before, _ = load_checkpoint(recorded / "checkpoints" / "midtrained")
    after, _ = load_checkpoint(run.checkpoints / FINAL)
    old = dict(before.named_parameters())
    changed = {n.rpartition(".")[2] for n, p in after.named_parameters() if not torch.equal(p, old[n])}
    assert changed == {"qkv", "out", "gate_up", "down"}
    assert Tokenizer.load(run.checkpoints / FINAL).digest == _tokenizer().digest
    assert (run.checkpoints / ADAPTER / "adapter_model.safetensors").exists()


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, recorded: Path) -> None:
    whole, _ = _train(_config(tmp_path / "whole", recorded))
    short = _config(tmp_path / "cut", recorded, num_steps=9)
    stopped = short.model_copy(update={"max_wall_s": 1e-9})
    with pytest.raises(InterruptedRunError):
        _train(stopped)
    again, report = _train(short, resume=True)
    assert report["rl_steps"] == 3
    assert torch.equal(_weights(whole), _weights(again))


def test_routes_that_were_not_kept_are_asked_for_by_name(tmp_path: Path, recorded: Path) -> None:
    model, _ = load_checkpoint(recorded / "checkpoints" / "midtrained")
    rollouts = Rollouts(model)  # type: ignore[arg-type]
    rollouts.blobs = MemoryBlobs()
    TrajectoryLog(tmp_path / "log").append([group_of(rollouts, 0)])
    checkpoint = str(recorded / "checkpoints" / "midtrained")
    config = _config(tmp_path, tmp_path / "log").model_copy(update={"initial_checkpoint": checkpoint})
    with pytest.raises(ConfigError, match="were not stored") as caught:
        _train(config)
    assert caught.value.fix is not None and "keep_routes" in caught.value.fix
    native = config.rl.model_copy(update={"router_replay": "off"})
    _, report = _train(config.model_copy(update={"rl": native, "name": "native"}))
    assert report["rl_steps"] == 1


def test_kept_blobs_outlast_their_use(tmp_path: Path) -> None:
    blobs = PermanentBlobs(tmp_path)
    ref = blobs.put(np.arange(4, dtype=np.uint8))
    blobs.discard(ref)
    assert PermanentBlobs(tmp_path).get(ref).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_that_keeps_its_routes_is_trained_on_again_with_them(tmp_path: Path) -> None:
    """The same weights see the same tokens: trainer and engine agree as they did then. The sessions are
    graded anew, for what so small a model does earns nothing."""
    rl = {"num_steps": 1, "keep_routes": True}
    run, _ = run_here(tiny_config(tmp_path, rl=rl, checkpoint={"every_s": 60.0, "curve_every_steps": 0}))
    graded = tmp_path / "graded"
    graded.mkdir()
    (graded / "routes").symlink_to(run.path / "routes")
    (graded / "checkpoints").symlink_to(run.path / "checkpoints")
    groups = [
        replace(
            group, members=tuple(replace(m, reward=RewardBreakdown(m.id.index % 2)) for m in group.members)
        )
        for group in TrajectoryLog(run.trajectories).read()
    ]
    TrajectoryLog(graded / "trajectories").append(groups)
    again, report = _train(_config(tmp_path, graded))
    assert report["trained_groups"] == len(groups) >= 2
    rows = read_metrics(again.metrics_file)
    assert rows[0]["train_tokens"] > 0
    assert rows[0]["ratio_max"] < 1.001


def test_a_source_without_a_log_is_refused_before_a_run_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in ("none", "empty"):
        with pytest.raises(ConfigError, match="holds no trajectories"):
            _train(_config(tmp_path, tmp_path / source))
    assert not (tmp_path / "replayed").exists()


def test_a_log_alone_needs_a_model_to_begin_with(tmp_path: Path, recorded: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_recorded(_config(tmp_path, recorded / "trajectories"))
    assert caught.value.field == "initial_checkpoint"
    assert RecordedSource(recorded / "trajectories").log.part_names()


def test_from_log_on_the_command_line(tmp_path: Path, recorded: Path) -> None:
    file = tmp_path / "replayed.toml"
    file.write_text(
        f'runs_directory = "{tmp_path}"\nnum_threads = 1\n[rl]\nnum_steps = 1\n', encoding="utf-8"
    )
    result = etude("train", "--config", str(file), "--name", "cli", "--from-log", str(recorded), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["trained_groups"] == 5
    assert load_config(tmp_path / "cli" / "config.toml").rl.stream.source == str(recorded)
    assert (tmp_path / "cli" / "report.html").exists()
    shown = etude("train", "--config", str(file), "--name", "cli", "--from-log", str(recorded), "--resume")
    assert shown.exit_code == 0, shown.output
    assert "1 steps on 5 groups" in shown.stdout
    assert np.isfinite(json.loads((tmp_path / "cli" / "report.json").read_text())["wall_s"])
    assert open_renderer(Tokenizer.load(tmp_path / "cli" / "checkpoints" / "final"), AgentConfig())
