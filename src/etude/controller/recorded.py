"""Reinforcement learning on trajectories that were recorded earlier: no engine, no sandboxes, no tasks.

log --take--> step --> metrics --> checkpoint: weights, optimiser and the log's cursor, written atomically
"""

from __future__ import annotations

import contextlib
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
    with run.lock(), JsonlSink(run.metrics_file) as metrics:
        newest = find_resumable(run.checkpoints / LATEST, metrics, observer) if resume else None
        state = (read_state(newest) or {}) if newest is not None else {}
        elapsed_s = float(state.get("elapsed_s", 0.0))
        with StopSignal(observer, config.max_wall_s, elapsed_s) as stop, contextlib.ExitStack() as parts:
            return _RecordedRun(config, run, observer, stop, metrics, newest, state, parts).train()


class _RecordedRun:
    """One process of a run on recorded trajectories."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        observer: Observer,
        stop: StopSignal,
        metrics: JsonlSink,
        newest: Path | None,
        state: dict[str, Any],
        parts: contextlib.ExitStack,
    ) -> None:
        """`parts`: owns what is opened here; the caller closes it."""
        config = resolve_numerics(resolve_model(resolve_recorded(config)))
        self._config, self._run, self._observer = resolve_compute(run, config, observer), run, observer
        self._stop, self._metrics = stop, metrics
        source = RecordedSource(Path(config.rl.stream.source))
        directory = Path(self._config.initial_checkpoint or "")
        tokenizer = agent_format(Tokenizer.load(directory), config.agent).tokenizer
        model = place_model(open_model(self._config, directory), self._config)
        use_numerics(model, self._config)
        part = TrainingPart(
            self._config, model, tokenizer, run, MemoryWeights(), metrics, observer, source.fetch_routes
        )
        self._trainer = parts.enter_context(part)
        if newest is not None:
            self._trainer.restore(newest)
        self._stream = RecordedStream(source.log, config.rl, state.get("stream"))

    def train(self) -> dict[str, Any]:
        rl = self._config.rl
        self._observer.stage_begins("reinforcement learning on recorded trajectories", rl.num_steps)
        exhausted = False
        while self._trainer.version.step < rl.num_steps and not self._stop:
            groups = self._stream.next_groups(rl.groups_per_step, lambda: bool(self._stop))
            if not groups:
                exhausted = not self._stop
                break
            trained = self._trainer.step(groups)
            passed = {f"passed_{reason}": float(n) for reason, n in sorted(self._stream.passed.items())}
            values = {"trained_groups": float(len(groups)), **passed, **trained}
            values["wall_s"] = self._stop.elapsed_s
            self._metrics.write("rl", self._trainer.version.step, values)
            self._observer.stage_advances(self._trainer.version.step, values)
            if self._trainer.is_due():
                self._save()
        self._save()
        self._trainer.flush()
        self._observer.stage_ends()
        if self._stop.interrupted and not exhausted and self._trainer.version.step < rl.num_steps:
            raise InterruptedRunError(f"resume with: etude train --resume --name {self._run.name}")
        return self._finish()

    def _save(self) -> None:
        stream, elapsed_s = self._stream.state_dict(), self._stop.elapsed_s
        self._trainer.save({"stage": "recorded", "stream": stream, "elapsed_s": elapsed_s})

    def _finish(self) -> dict[str, Any]:
        self._trainer.save_model(self._run.checkpoints / FINAL, with_tokenizer=True)
        base = self._config.initial_checkpoint or ""
        self._trainer.save_adapters(self._run.checkpoints / ADAPTER, base)
        report = {
            "name": self._config.name,
            "seed": self._config.seed,
            "source": self._config.rl.stream.source,
            "rl_steps": self._trainer.version.step,
            "trained_groups": self._stream.num_taken,
            "passed_groups": dict(self._stream.passed),
            "wall_s": self._stop.elapsed_s,
            "stages": {"rl_s": self._stop.elapsed_s},
            **self._run.origin,
        }
        write_json(self._run.report_file, report)
        return report
