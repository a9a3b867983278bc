"""A run of next-token training on a mixture of sources: the common part of `etude pretrain` and `etude sft`.

held-out loss -> steps, with the held-out loss at intervals -> held-out loss -> model, report
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from etude.config import MixtureConfig, PretrainConfig, RunConfig, StageConfig
from etude.controller.compute import place_model, resolve_compute
from etude.controller.evaluate import FINAL
from etude.controller.models import open_model as open_initial
from etude.controller.models import resolve_model
from etude.controller.next_token import AnyNextTokenTrainer, open_next_token_trainer
from etude.controller.stages import Figures, StageRunner
from etude.controller.stopping import StopSignal
from etude.controller.thread_choice import ThreadChoice
from etude.controller.train import LATEST, OFFENDING, InterruptedRunError
from etude.errors import ConfigError
from etude.kit.durable import write_json
from etude.model import DraftLayers, LanguageModel, build_model
from etude.model.huggingface import load_draft_layers
from etude.model.huggingface.drafts import add_draft_layers
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
class Learner:
    """The trained model with its tokenizer and draft layers."""

    tokenizer: Tokenizer
    model: LanguageModel
    drafts: DraftLayers | None

    @staticmethod
    def open(config: RunConfig, section: MixtureConfig, tokenizer: Tokenizer) -> Learner:
        """The initial model and draft layers. Raises as `open_model` and `open_drafts`."""
        model = open_model(config, section, tokenizer)
        return Learner(tokenizer, model, open_drafts(config, section, model))


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

    @property
    def section(self) -> MixtureConfig:
        """The stage's settings."""
        return self.config.pretrain if self.stage == "pretrain" else self.config.sft

    def mix(self, sources: Sequence[Source], window: int) -> Mixture:
        """The mixture of these sources."""
        section = self.section
        return Mixture(sources, section.tokens_per_step, section.pool_tokens, window, self.config.seed)

    def train(self, learner: Learner, mixture: Mixture, heldout: Callable[[int], Heldout]) -> dict[str, Any]:
        """Trains to the end of the stage and returns the report. `heldout`: held-out documents for a window.

        Raises InterruptedRunError after Ctrl-C or SIGTERM, with the state saved.
        """
        return _Training(self, learner, mixture, heldout).execute()


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
        with JsonlSink(run.metrics_file) as metrics, open_stop(config, run, metrics, observer) as stop:
            config = resolve_compute(run, resolve(config), observer)
            return train(StageContext(config, stage, run, observer, stop, metrics, report))


class _Training:
    """The stage of one process."""

    def __init__(
        self, context: StageContext, learner: Learner, mixture: Mixture, heldout: Callable[[int], Heldout]
    ) -> None:
        self.config, self.section, self.stage = context.config, context.section, context.stage
        self.run, self.observer, self.stop = context.run, context.observer, context.stop
        self.metrics, self.report = context.metrics, context.report
        self.tokenizer, self.model, self.drafts = learner.tokenizer, learner.model, learner.drafts
        self.mixture, self.heldout = mixture, heldout

    def execute(self) -> dict[str, Any]:
        drafts = None if self.drafts is None else DraftTraining(self.drafts, self.section.drafts)
        offending = self.run.path / OFFENDING
        opened = open_next_token_trainer(
            self.model, self.mixture, self.section, self.config, drafts, offending
        )
        with opened as trainer:
            return self._train(trainer)

    def _train(self, trainer: AnyNextTokenTrainer) -> dict[str, Any]:
        title = "pre-training" if self.stage == "pretrain" else "fine-tuning"
        runner = StageRunner(
            self.stage,
            title,
            self.config.checkpoint,
            self.run.checkpoints / LATEST,
            self.stop,
            self.metrics,
            self.observer,
            _shown,
            ThreadChoice(self.config, self.model, title, self.observer.say),
        )
        if not runner.restore(trainer):
            self._enter_stages(trainer, 0)
        if "heldout_before" not in self.report:
            self.report["heldout_before"] = self._measure(trainer)
            self.run.write_report(self.report)

        def after_step(step: int) -> None:
            every = self.section.heldout_every_steps
            if every and step % every == 0 and step < self.section.num_steps:
                self._measure(trainer)
            self._enter_stages(trainer, step)

        if not runner.run(trainer, self.section.num_steps, after_step):
            raise InterruptedRunError(f"resume with: etude {self.stage} --resume --name {self.run.name}")
        return self._finish(trainer)

    def _finish(self, trainer: AnyNextTokenTrainer) -> dict[str, Any]:
        mixture = self.mixture
        if mixture.exhausted and trainer.num_steps_taken < self.section.num_steps:
            self.observer.say(f"all sources are exhausted after {trainer.num_steps_taken} steps")
        self.report |= {
            "name": self.run.name,
            "stage": self.stage,
            "steps": trainer.num_steps_taken,
            "exhausted": mixture.exhausted,
            "window": self.model.config.max_positions if isinstance(self.model, LanguageModel) else None,
            "wall_s": self.stop.elapsed_s,
            "heldout_after": self._measure(trainer),
            "sources": _describe_accounts(mixture),
        }
        whole = trainer.whole_model()
        if self.drafts is not None:
            self.report["acceptance"] = self._measure_acceptance(
                whole.to(device_of(self.drafts)), self.drafts
            )
        self.report |= self.run.origin
        save_checkpoint(self.run.checkpoints / FINAL, whole, write_more=self._write_beside)
        write_json(self.run.report_file, {**self.report, "complete": True})
        return self.report

    def _write_beside(self, directory: Path) -> None:
        self.tokenizer.save(directory)
        if self.drafts is not None:
            add_draft_layers(self.drafts, directory)

    def _measure(self, trainer: AnyNextTokenTrainer) -> dict[str, dict[str, float]]:
        """Held-out losses in nats per token, by source. Only finite ones are returned, for the report's JSON;
        the metric rows have all."""
        measured: dict[str, dict[str, float]] = {}
        for name, kinds in self.heldout(self._window).items():
            losses = {kind: trainer.evaluate(documents) for kind, documents in kinds.items() if documents}
            if losses:
                measured[name] = {kind: loss for kind, loss in losses.items() if math.isfinite(loss)}
                row = {"name": name, **losses, "window": self._window, "wall_s": self.stop.elapsed_s}
                self.metrics.write(HELDOUT, trainer.num_steps_taken, row)
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
        return window_of(self.model, self.config)

    @property
    def _stages(self) -> Mapping[str, StageConfig]:
        return self.section.stages if isinstance(self.section, PretrainConfig) else {}

    def _enter_stages(self, trainer: AnyNextTokenTrainer, step: int) -> None:
        """Sets the window of model and mixture, if a stage begins with `step`."""
        for name, stage in self._stages.items():
            if stage.from_step == step:
                trainer.set_context(extended(self.model.config, stage))
                self.mixture.set_window(stage.window)
                self.observer.say(f"stage {name}: a window of {stage.window} tokens")


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


def check_ranks(config: RunConfig, section: MixtureConfig) -> None:
    """Raises ConfigError for settings that training on several ranks does not support."""
    parallel, initial = config.parallel, config.initial_checkpoint
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


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with the model of `initial_checkpoint`. Raises ConfigError, CheckpointError."""
    for section in (config.pretrain, config.sft):
        check_ranks(config, section)
    return resolve_model(config, samples=False)


def open_stop(config: RunConfig, run: RunDirectory, metrics: MetricSink, observer: Observer) -> StopSignal:
    """The stop signal of this process; earlier processes' wall time counts, as of the last checkpoint."""
    newest = find_resumable(run.checkpoints / LATEST, metrics, observer)
    state = read_state(newest) if newest is not None else None
    return StopSignal(observer, config.max_wall_s, float((state or {}).get("elapsed_s", 0.0)))


def _describe_accounts(mixture: Mixture) -> dict[str, dict[str, Any]]:
    """The mixture's accounts with keys that survive JSON."""
    described: dict[str, dict[str, Any]] = {}
    for name, account in mixture.accounts().items():
        times = {str(count): number for count, number in account.times_seen.items()}
        described[name] = {**asdict(account), "times_seen": times}
    return described


def _shown(values: Figures) -> Figures:
    kept = ("loss", "balance", "grad_norm", "skipped", "fill")
    return {
        name: value
        for name, value in values.items()
        if name in kept or name.startswith(("draft_loss_", "epochs/", "share/"))
    }
