"""A run of next-token training on a mixture of sources: the common part of `etude pretrain` and `etude sft`.

held-out loss -> steps, with the held-out loss at intervals -> held-out loss -> model, report
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from etude.config import MixtureConfig, PretrainConfig, RunConfig
from etude.controller.compute import place_model, resolve_compute
from etude.controller.evaluate import FINAL
from etude.controller.models import open_model as open_initial
from etude.controller.models import resolve_model
from etude.controller.next_token import AnyNextTokenTrainer, open_next_token_trainer
from etude.controller.stages import Figures, StageRunner
from etude.controller.stopping import StopSignal
from etude.controller.thread_choice import ThreadChoice
from etude.controller.train import InterruptedRunError
from etude.controller.training_part import LATEST, OFFENDING
from etude.errors import ConfigError
from etude.kit.durable import write_json
from etude.model import DraftLayers, LanguageModel, build_model
from etude.model.huggingface import load_draft_layers
from etude.model.loading import AnyModel, read_architecture
from etude.model.scoring import device_of
from etude.observe import JsonlSink, MetricSink, Observer, RunDirectory
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document, save_checkpoint
from etude.training.checkpoints import find_resumable, read_state
from etude.training.pretraining.context import extended
from etude.training.pretraining.drafts import initialise_drafts, measure_acceptance
from etude.training.pretraining.mixture import Mixture, Source
from etude.training.pretraining.trainer import DraftTraining

HELDOUT = "heldout"
"""Kind of the metric rows of held-out losses, one per source."""

Stage = Literal["pretrain", "sft"]

Heldout = Mapping[str, Mapping[str, Sequence[Document]]]
"""Held-out documents by source and measure (`loss`, `middle_loss`); only their marked tokens count."""


@dataclass(frozen=True, slots=True)
class StageContext:
    """A stage's run in this process, from start or resumption to its end."""

    config: RunConfig
    stage: Stage
    run: RunDirectory
    observer: Observer
    stop: StopSignal
    metrics: MetricSink
    report: dict[str, Any]
    newest: Path | None
    """The checkpoint to continue from."""

    @property
    def section(self) -> MixtureConfig:
        """The stage's settings."""
        return self.config.pretrain if self.stage == "pretrain" else self.config.sft

    def train(
        self,
        tokenizer: Tokenizer,
        model: LanguageModel,
        sources: Sequence[Source],
        heldout: Callable[[int], Heldout],
    ) -> dict[str, Any]:
        """Trains to the end of the stage on a mixture of `sources`, and returns the report. `heldout`:
        held-out documents for a window.

        Raises InterruptedRunError after Ctrl-C or SIGTERM, with the state saved; ConfigError for draft layers
        that do not fit the checkpoint.
        """
        config, section, window = self.config, self.section, window_of(model, self.config)
        drafts = open_drafts(config, section, model)
        mixture = Mixture(sources, section.tokens_per_step, section.pool_tokens, window, config.seed)
        training = None if drafts is None else DraftTraining(drafts, section.drafts)
        offending = self.run.path / OFFENDING
        with open_next_token_trainer(model, mixture, section, config, training, offending) as trainer:
            return _Training(self, tokenizer, model, drafts, mixture, heldout, trainer).run()


def run_stage(
    stage: Stage,
    config: RunConfig,
    run: RunDirectory,
    observer: Observer,
    resume: bool,
    train: Callable[[StageContext], dict[str, Any]],
) -> dict[str, Any]:
    """Runs `train` in this process and returns its report, or the report of a finished run."""
    with run.lock():
        report: dict[str, Any] = (run.read_json(run.report_file) or {}) if resume else {}
        if report.get("complete"):
            observer.say("the run has already finished")
            return report
        with JsonlSink(run.metrics_file) as metrics:
            newest = find_resumable(run.checkpoints / LATEST, metrics, observer)
            state = (read_state(newest) or {}) if newest is not None else {}
            own = newest if state.get("stage") == stage else None
            # Earlier processes' wall time counts, as of the last checkpoint.
            elapsed_s = float(state.get("elapsed_s", 0.0))
            state.clear()  # it maps a file that will be replaced
            with StopSignal(observer, config.max_wall_s, elapsed_s) as stop:
                config = resolve_compute(run, resolve(config), observer)
                return train(StageContext(config, stage, run, observer, stop, metrics, report, own))


@dataclass(frozen=True, slots=True)
class _Training:
    """The stage of one process."""

    context: StageContext
    tokenizer: Tokenizer
    model: LanguageModel
    drafts: DraftLayers | None
    mixture: Mixture
    heldout: Callable[[int], Heldout]
    trainer: AnyNextTokenTrainer

    def run(self) -> dict[str, Any]:
        context, section, trainer = self.context, self.context.section, self.trainer
        title = "pre-training" if context.stage == "pretrain" else "fine-tuning"
        runner = StageRunner(
            context.stage,
            title,
            context.config.checkpoint,
            context.run.checkpoints / LATEST,
            context.stop,
            context.metrics,
            context.observer,
            _shown,
            ThreadChoice(context.config, self.model, title, context.observer.say),
        )
        if context.newest is not None:
            trainer.restore(context.newest)
        else:
            self._enter_stages(0)
        if "heldout_before" not in context.report:
            context.report["heldout_before"] = self._measure()
            context.run.write_report(context.report)

        def after_step(step: int) -> None:
            every = section.heldout_every_steps
            if every and step % every == 0 and step < section.num_steps:
                self._measure()
            self._enter_stages(step)

        if not runner.run(trainer, section.num_steps, after_step):
            raise InterruptedRunError(
                f"resume with: etude {context.stage} --resume --name {context.run.name}"
            )
        self._finish()
        return context.report

    def _finish(self) -> None:
        """Saves the model and completes the report."""
        run, report = self.context.run, self.context.report
        num_steps, exhausted = self.trainer.num_steps_taken, self.mixture.exhausted
        if exhausted and num_steps < self.context.section.num_steps:
            self.context.observer.say(f"all sources are exhausted after {num_steps} steps")
        report |= {
            "name": run.name,
            "stage": self.context.stage,
            "steps": num_steps,
            "exhausted": exhausted,
            "window": self.model.config.max_positions if isinstance(self.model, LanguageModel) else None,
            "wall_s": self.context.stop.elapsed_s,
            "heldout_after": self._measure(),
            "sources": _describe_accounts(self.mixture),
        }
        whole = self.trainer.whole_model()
        if self.drafts is not None:
            report["acceptance"] = self._measure_acceptance(whole.to(device_of(self.drafts)), self.drafts)
        report |= run.origin
        save_checkpoint(run.checkpoints / FINAL, whole, write_more=self.tokenizer.save, drafts=self.drafts)
        write_json(run.report_file, {**report, "complete": True})

    def _measure(self) -> dict[str, dict[str, float]]:
        """Held-out losses in nats per token, by source. Only finite ones are returned, for the report's JSON;
        the metric rows have all."""
        measured: dict[str, dict[str, float]] = {}
        for name, kinds in self.heldout(self._window).items():
            losses = {
                kind: self.trainer.evaluate(documents) for kind, documents in kinds.items() if documents
            }
            if losses:
                measured[name] = {kind: loss for kind, loss in losses.items() if math.isfinite(loss)}
                row = {"name": name, **losses, "window": self._window, "wall_s": self.context.stop.elapsed_s}
                self.context.metrics.write(HELDOUT, self.trainer.num_steps_taken, row)
        return measured

    def _measure_acceptance(
        self, model: LanguageModel, drafts: DraftLayers
    ) -> dict[str, list[dict[str, float]]]:
        """Acceptance of drafts on held-out texts, by source and depth."""
        return {
            name: [asdict(depth) for depth in measure_acceptance(model, drafts, kinds["loss"])]
            for name, kinds in self.heldout(self._window).items()
            if kinds.get("loss")
        }

    @property
    def _window(self) -> int:
        return window_of(self.model, self.context.config)

    def _enter_stages(self, step: int) -> None:
        """Sets the window of model and mixture, if a stage begins with `step`."""
        section = self.context.section
        for name, stage in section.stages.items() if isinstance(section, PretrainConfig) else ():
            if stage.from_step == step:
                self.trainer.set_context(extended(self.model.config, stage))
                self.mixture.set_window(stage.window)
                self.context.observer.say(f"stage {name}: a window of {stage.window} tokens")


def window_of(model: LanguageModel, config: RunConfig) -> int:
    """Most tokens of a sequence: the model's current window, or the configured one of a foreign model."""
    return model.config.max_positions if isinstance(model, LanguageModel) else config.model.max_positions


def open_model(config: RunConfig, section: MixtureConfig, tokenizer: Tokenizer) -> LanguageModel:
    """The initial model: the checkpoint's, or a new one. Raises ConfigError where it does not fit the
    tokenizer or the section, CheckpointError."""
    if config.initial_checkpoint is None:
        model: AnyModel = build_model(config.model, tokenizer.vocab_size)
        model.initialise(config.seed)
    else:
        model = open_initial(config, Path(config.initial_checkpoint))
    if isinstance(model, LanguageModel):
        if model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"has {tokenizer.vocab_size} tokens, but the model only {model.vocab_size}",
                field="tokenizer",
                received=tokenizer.vocab_size,
                fix="use the model's own tokenizer",
            )
    elif section.drafts.num_layers or (isinstance(section, PretrainConfig) and section.stages):
        raise ConfigError(
            "draft layers and stages need an architecture that Étude implements",
            field="initial_checkpoint",
            received=config.initial_checkpoint,
        )
    # Foreign models train through the same packed scoring.
    return cast(LanguageModel, place_model(model, config))


def open_drafts(config: RunConfig, section: MixtureConfig, model: LanguageModel) -> DraftLayers | None:
    """The draft layers to train: the checkpoint's, new ones, or none. Raises ConfigError."""
    wanted, initial = section.drafts.num_layers, config.initial_checkpoint
    if not wanted:
        if section.drafts.only:
            raise ConfigError("there are no draft layers to train", field="drafts.num_layers", received=0)
        return None
    drafts = None if initial is None else load_draft_layers(Path(initial))
    if drafts is None:
        drafts = DraftLayers(model.config, wanted)
        initialise_drafts(drafts, config.seed)
    elif len(drafts.layers) != wanted:
        raise ConfigError(
            f"must be {len(drafts.layers)}, as in the checkpoint",
            field="drafts.num_layers",
            received=wanted,
            fix=f"set it to {len(drafts.layers)}",
        )
    return place_model(drafts, config)


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with the model of `initial_checkpoint`. Raises ConfigError, also for settings that
    training on several ranks does not support, and CheckpointError."""
    parallel, initial = config.parallel, config.initial_checkpoint
    for section in (config.pretrain, config.sft):
        if section.drafts.num_layers and parallel.replicate != parallel.ranks:
            raise ConfigError(
                "draft layers need a whole copy of the model in each process",
                field="drafts.num_layers",
                received=section.drafts.num_layers,
                fix="set parallel.fsdp, parallel.expert, parallel.context and parallel.tensor to 1",
            )
    if parallel.ranks > 1 and initial is not None and read_architecture(Path(initial)) is None:
        raise ConfigError(
            "several ranks can train only an architecture that Étude implements",
            field="parallel.ranks",
            received=parallel.ranks,
            fix="train other architectures in one process",
        )
    return resolve_model(config, samples=False)


def _describe_accounts(mixture: Mixture) -> dict[str, dict[str, Any]]:
    """The mixture's accounts with keys that survive JSON."""
    return {
        name: {**asdict(account), "times_seen": {str(k): number for k, number in account.times_seen.items()}}
        for name, account in mixture.accounts().items()
    }


def _shown(values: Figures) -> Figures:
    kept = ("loss", "balance", "grad_norm", "skipped", "fill")
    return {
        name: value
        for name, value in values.items()
        if name in kept or name.startswith(("draft_loss_", "epochs/", "share/"))
    }
