"""The loop of every stage of next-token training: steps, metrics, checkpoints.

Mid-training is the stage of a run that makes a model that plays sessions from random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.config import CheckpointConfig, RunConfig
from etude.controller.next_token import AnyNextTokenTrainer
from etude.controller.stopping import StopSignal
from etude.controller.thread_choice import ThreadChoice
from etude.model import LanguageModel
from etude.observe import MetricSink, Observer
from etude.training import Document, NextTokenTrainer, ShuffledDocuments
from etude.training.checkpoints import CheckpointKeeper

REPORT_EVERY = 10
"""Steps between two rows of metrics."""

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StageRunner:
    """Runs one stage of a run. Its checkpoints resume bit for bit, with the same number of processes and
    threads and the same micro-batches."""

    stage: str
    """Name of the stage in metric rows and the checkpoint."""
    title: str
    """Name of the stage in messages."""
    checkpoint: CheckpointConfig
    latest: Path
    """The resumable checkpoint: written every few seconds and at a stop."""
    stop: StopSignal
    metrics: MetricSink
    observer: Observer
    shown: Callable[[Figures], Figures]
    """Selects the reported figures of a step."""
    threads: ThreadChoice

    def run(self, trainer: AnyNextTokenTrainer, num_steps: int, after_step: Callable[[int], None]) -> bool:
        """Takes steps until `num_steps`; returns whether the stage is complete or exhausted. An interrupted
        stage is saved. `after_step` is called with each step, before it is saved."""
        self.observer.stage_begins(self.title, num_steps)
        if trainer.num_steps_taken:
            self.observer.say(f"continuing after step {trainer.num_steps_taken}")
        with CheckpointKeeper(self.latest, self.checkpoint, self.metrics, self.observer) as keeper:
            self._take_steps(trainer, keeper, after_step)
            self.observer.stage_ends()
            if self.stop and not trainer.finished:
                self._save(trainer, keeper)
                keeper.flush()
                return False
        return True

    def _take_steps(
        self, trainer: AnyNextTokenTrainer, keeper: CheckpointKeeper, after_step: Callable[[int], None]
    ) -> None:
        while not trainer.finished and not self.stop:
            values = self.threads.step(trainer.step)
            step = trainer.num_steps_taken
            wall = {"tokens_per_s": values["tokens"] / values["step_s"], "wall_s": self.stop.elapsed_s}
            shown = {**self.shown(values), **wall}
            self.observer.stage_advances(step, shown)  # at every step: a large model's take long
            if step % REPORT_EVERY == 0 or trainer.finished:
                self.metrics.write(self.stage, step, shown)
            after_step(step)
            if keeper.due:
                self._save(trainer, keeper)

    def _save(self, trainer: AnyNextTokenTrainer, keeper: CheckpointKeeper) -> None:
        extra = {"stage": self.stage, "step": trainer.num_steps_taken, "elapsed_s": self.stop.elapsed_s}
        trainer.save(self.latest, extra, keeper.write)


STAGE = "midtrain"
MIDTRAINING = "mid-training"
"""Name of the stage in messages."""
_CURVE_SHARES = (0.25, 0.5, 0.75)


def run_midtraining(
    model: LanguageModel,
    documents: Sequence[Document],
    config: RunConfig,
    latest: Path,
    newest: Path | None,
    stop: StopSignal,
    metrics: MetricSink,
    observer: Observer,
    save_curve: Callable[[str], None],
) -> bool:
    """Trains `model` in place; returns whether the stage is complete rather than interrupted.

    `latest`: the resumable checkpoint, see StageRunner. `newest`: the one to continue from. `save_curve`:
    saves a named snapshot for the learning curve.
    """
    batches = ShuffledDocuments(documents, config.midtrain.tokens_per_step, config.seed)
    trainer = NextTokenTrainer(model, batches, config.midtrain)
    total = config.midtrain.num_steps
    curve_steps = {round(share * total) for share in _CURVE_SHARES}
    threads = ThreadChoice(config, model, MIDTRAINING, observer.say)
    runner = StageRunner(
        STAGE, MIDTRAINING, config.checkpoint, latest, stop, metrics, observer, _shown, threads
    )
    if newest is not None:
        trainer.restore(newest)

    def after_step(step: int) -> None:
        if step in curve_steps and config.checkpoint.curve_every_steps:
            save_curve(f"midtrain-{step:05d}")

    return runner.run(trainer, total, after_step)


def _shown(values: Figures) -> Figures:
    return {"loss": values["loss"], "agent_loss": values["agent_loss"]}
