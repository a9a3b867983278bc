"""The mid-training stage: from nothing to a model that plays sessions, resumable at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from etude.config import RunConfig
from etude.controller.stages import Figures, StageRunner
from etude.controller.stopping import StopSignal
from etude.controller.thread_choice import ThreadChoice
from etude.model import LanguageModel
from etude.observe import MetricSink, Observer
from etude.training import Document, NextTokenTrainer, ShuffledDocuments

STAGE = "midtrain"
MIDTRAINING = "mid-training"
"""The stage, for people."""
_CURVE_SHARES = (0.25, 0.5, 0.75)


def run_midtraining(
    model: LanguageModel,
    documents: Sequence[Document],
    config: RunConfig,
    latest: Path,
    stop: StopSignal,
    metrics: MetricSink,
    observer: Observer,
    save_curve: Callable[[str], None],
) -> bool:
    """Trains `model` in place; returns whether the stage is complete, and not cut.

    `latest` is the resumable checkpoint: see StageRunner. `save_curve` keeps a named snapshot for the
    learning curve.
    """
    batches = ShuffledDocuments(documents, config.midtrain.tokens_per_step, config.seed)
    trainer = NextTokenTrainer(model, batches, config.midtrain)
    total = config.midtrain.num_steps
    curve_steps = {round(share * total) for share in _CURVE_SHARES}
    threads = ThreadChoice(config, model, MIDTRAINING, observer.say)
    runner = StageRunner(
        STAGE, MIDTRAINING, config.checkpoint, latest, stop, metrics, observer, _shown, threads
    )
    runner.restore(trainer)

    def after_step(step: int) -> None:
        if step in curve_steps and config.checkpoint.curve_every_steps:
            save_curve(f"midtrain-{step:05d}")

    return runner.run(trainer, total, after_step)


def _shown(values: Figures) -> Figures:
    return {"loss": values["loss"], "agent_loss": values["agent_loss"]}
