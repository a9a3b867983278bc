"""Reinforcement learning on trajectories that were recorded earlier: no engine, no sandboxes, no tasks.

log --take--> step --> metrics --> checkpoint: weights, optimiser and the log's cursor, written atomically
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.agent import agent_format
from etude.config import RunConfig
from etude.controller.compute import place_model, resolve_compute, resolve_numerics, use_numerics
from etude.controller.evaluate import FINAL, MIDTRAINED
from etude.controller.models import open_model, resolve_model
from etude.controller.stopping import StopSignal
from etude.controller.train import ADAPTER, ROUTES, InterruptedRunError
from etude.controller.training_part import LATEST, TrainingPart
from etude.environment.recording.spec import RECORDED_ROUTES
from etude.errors import ConfigError
from etude.kit.durable import write_json
from etude.observe import JsonlSink, Observer, RunDirectory
from etude.records import BlobRef
from etude.store.blobs import FileBlobs
from etude.store.trajectories import TrajectoryLog, find_log
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.training.checkpoints import find_resumable, read_state
from etude.training.stream import RecordedStream
from etude.weights import MemoryWeights


class RecordedSource:
    """A run directory, the store of `etude record serve`, or a trajectory log alone."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where there is no log."""
        if (log := find_log(path)) is None:
            raise ConfigError(
                "holds no trajectories",
                field="rl.stream.source",
                received=str(path),
                fix="name a run directory, or a directory with part-*.parquet files",
            )
        self.path = path
        self.log = TrajectoryLog(log)
        kept = (log.parent / ROUTES, log / RECORDED_ROUTES)
        self._blobs = next((FileBlobs(routes) for routes in kept if routes.is_dir()), None)

    def fetch_routes(self, ref: BlobRef) -> NDArray[np.generic]:
        """The expert routes of a segment. Raises ConfigError where they were not stored."""
        if self._blobs is None or ref.url.startswith("memory:"):
            raise ConfigError(
                "the expert routes of these trajectories were not stored",
                field="rl.router_replay",
                received="r3",
                fix="set it to 'r2' or 'off', or record with rl.keep_routes = true",
            )
        return self._blobs.get(ref)


def resolve_recorded(config: RunConfig) -> RunConfig:
    """The configuration with the checkpoint from which a run on recorded trajectories begins.

    Unless `initial_checkpoint` names one, it is the model with which the recorded run's RL began. Raises
    ConfigError where there is none, or no log.
    """
    source = RecordedSource(Path(config.rl.stream.source))
    directory = config.initial_checkpoint or str(source.path / "checkpoints" / MIDTRAINED)
    if not (Path(directory) / TOKENIZER_FILE).exists():
        raise ConfigError(
            "must name a checkpoint with a tokenizer to start from",
            field="initial_checkpoint",
            received=config.initial_checkpoint,
            fix="name the model that sampled the trajectories",
        )
    return config.model_copy(update={"initial_checkpoint": directory})


def train_recorded(config: RunConfig, run: RunDirectory, observer: Observer, resume: bool) -> dict[str, Any]:
    """Takes `rl.num_steps` steps on the log of `rl.stream.source`, or fewer where it is exhausted; returns
    the report.

    With `resume` continues from the last checkpoint. Raises InterruptedRunError after Ctrl-C or SIGTERM, with
    the state saved.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.lock())
        metrics = stack.enter_context(JsonlSink(run.metrics_file))
        newest = find_resumable(run.checkpoints / LATEST, metrics, observer) if resume else None
        state = (read_state(newest) or {}) if newest is not None else {}
        elapsed_s = float(state.get("elapsed_s", 0.0))
        stop = stack.enter_context(StopSignal(observer, config.max_wall_s, elapsed_s))
        config = resolve_compute(run, resolve_numerics(resolve_model(config)), observer)
        source = RecordedSource(Path(config.rl.stream.source))
        directory = Path(config.initial_checkpoint or "")
        tokenizer = agent_format(Tokenizer.load(directory), config.agent).tokenizer
        model = place_model(open_model(config, directory), config)
        use_numerics(model, config)
        part = TrainingPart(
            config, model, tokenizer, run, MemoryWeights(), metrics, observer, source.fetch_routes
        )
        trainer = stack.enter_context(part)
        if newest is not None:
            trainer.restore(newest)
        stream = RecordedStream(source.log, config.rl, state.get("stream"))
        return _RecordedRun(config, run, observer, stop, metrics, trainer, stream).train()


@dataclass(frozen=True, slots=True)
class _RecordedRun:
    """One process of a run on recorded trajectories."""

    config: RunConfig
    run: RunDirectory
    observer: Observer
    stop: StopSignal
    metrics: JsonlSink
    trainer: TrainingPart
    stream: RecordedStream

    def train(self) -> dict[str, Any]:
        rl = self.config.rl
        self.observer.stage_begins("reinforcement learning on recorded trajectories", rl.num_steps)
        exhausted = False
        while self.trainer.version.step < rl.num_steps and not self.stop:
            groups = self.stream.next_groups(rl.groups_per_step, lambda: bool(self.stop))
            if not groups:
                exhausted = not self.stop
                break
            trained = self.trainer.step(groups)
            passed = {f"passed_{reason}": float(n) for reason, n in sorted(self.stream.passed.items())}
            values = {"trained_groups": float(len(groups)), **passed, **trained}
            values["wall_s"] = self.stop.elapsed_s
            self.metrics.write("rl", self.trainer.version.step, values)
            self.observer.stage_advances(self.trainer.version.step, values)
            if self.trainer.is_due():
                self._save()
        self._save()
        self.trainer.flush()
        self.observer.stage_ends()
        if self.stop and not exhausted and self.trainer.version.step < rl.num_steps:
            raise InterruptedRunError(f"resume with: etude train --resume --name {self.run.name}")
        return self._finish()

    def _save(self) -> None:
        stream, elapsed_s = self.stream.state_dict(), self.stop.elapsed_s
        self.trainer.save({"stage": "recorded", "stream": stream, "elapsed_s": elapsed_s})

    def _finish(self) -> dict[str, Any]:
        self.trainer.save_model(self.run.checkpoints / FINAL, with_tokenizer=True)
        base = self.config.initial_checkpoint or ""
        self.trainer.save_adapters(self.run.checkpoints / ADAPTER, base)
        report = {
            "name": self.config.name,
            "seed": self.config.seed,
            "source": self.config.rl.stream.source,
            "rl_steps": self.trainer.version.step,
            "trained_groups": self.stream.num_taken,
            "passed_groups": dict(self.stream.passed),
            "wall_s": self.stop.elapsed_s,
            "stages": {"rl_s": self.stop.elapsed_s},
            **self.run.origin,
        }
        write_json(self.run.report_file, report)
        return report
