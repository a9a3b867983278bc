"""The loop of every stage of next-token training: steps, metrics, checkpoints, until it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import CheckpointConfig
from etude.controller.stopping import StopSignal
from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.observe import MetricSink, Observer
from etude.training import NextTokenTrainer, has_checkpoint, load_checkpoint, save_checkpoint

REPORT_EVERY = 10
"""Steps between two rows of metrics."""

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StageRunner:
    """Runs one stage of a run. What it saves is enough to go on bit for bit."""

    stage: str
    """Of the rows of metrics, and of the checkpoint."""
    title: str
    """For people."""
    checkpoint: CheckpointConfig
    latest: Path
    """The resumable checkpoint: read if it is there, written every few seconds and at a stop."""
    stop: StopSignal
    metrics: MetricSink
    observer: Observer
    shown: Callable[[Figures], Figures]
    """Which of a step's figures are reported."""
    write_more: Callable[[Path], object] | None = None
    """Adds files to the checkpoint: it gets the directory to write to."""

    def restore(
        self, trainer: NextTokenTrainer, adapt: Callable[[LanguageModel], None] | None = None
    ) -> bool:
        """Takes up the stage's checkpoint, if there is one; returns whether there was.

        `adapt` is shown the stored model before its weights are taken over. Raises CheckpointError.
        """
        if not has_checkpoint(self.latest):
            return False
        model, state = load_checkpoint(self.latest)
        if state is None or state.get("stage") != self.stage:
            return False
        if not isinstance(model, LanguageModel):
            raise CheckpointError("is of an architecture that is not defined here", field="checkpoint")
        if adapt is not None:
            adapt(model)
        trainer.model.load_state_dict(model.state_dict())
        if trainer.drafts is not None:
            trainer.drafts.layers.load_state_dict(state["drafts"])
        trainer.load_state_dict(state["trainer"])
        return True

    def run(self, trainer: NextTokenTrainer, num_steps: int, after_step: Callable[[int], None]) -> bool:
        """Takes steps until `num_steps`; returns whether the stage is over: complete, exhausted or out of
        time. `after_step` is told each step, before it is saved."""
        self.observer.stage_begins(self.title, num_steps)
        saved_at = time.monotonic()
        while not trainer.finished and not self.stop:
            values = trainer.step()
            step = trainer.num_steps_taken
            if step % REPORT_EVERY == 0 or trainer.finished:
                wall = {"tokens_per_s": values["tokens"] / values["step_s"], "wall_s": self.stop.elapsed_s}
                shown = {**self.shown(values), **wall}
                self.metrics.write(self.stage, step, shown)
                self.observer.stage_advances(step, shown)
            after_step(step)
            if time.monotonic() - saved_at > self.checkpoint.every_s:
                self.save(trainer)
                saved_at = time.monotonic()
        self.observer.stage_ends()
        if self.stop.interrupted and not trainer.finished:
            self.save(trainer)
            return False
        return True

    def save(self, trainer: NextTokenTrainer) -> None:
        """Writes the resumable checkpoint now."""
        state: dict[str, Any] = {
            "stage": self.stage,
            "trainer": trainer.state_dict(),
            "elapsed_s": self.stop.elapsed_s,
        }
        if trainer.drafts is not None:
            state["drafts"] = trainer.drafts.layers.state_dict()
        save_checkpoint(self.latest, trainer.model, state, self.write_more)
