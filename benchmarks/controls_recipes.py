"""The training recipes that benchmarks/controls.py compares: RL, and other uses of its time or tokens."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.config import EvaluationConfig, RunConfig, load_config
from etude.controller.evaluate import FINAL, MIDTRAINED
from etude.controller.train import train
from etude.model.huggingface import load_model
from etude.observe import RunDirectory, SilentObserver
from etude.records import Group
from etude.store.trajectories import TrajectoryLog
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document, NextTokenTrainer, ShuffledDocuments, save_checkpoint

_LIGHT = (
    *(f"evaluation.{name}=1" for name in EvaluationConfig.model_fields if name.startswith("num_")),
    "checkpoint.curve_every_steps=0",
)
"""Settings of controls: the script evaluates them, so their own evaluation is reduced."""
_FEW = ("evaluation.num_tasks=96", "evaluation.num_family_tasks=1", "evaluation.num_repeated_tasks=1")
"""Settings of RL: its own evaluation only measures its behaviour and the effect of masked output."""
_SECONDS = "seconds.txt"
"""File in a checkpoint: seconds of its fine-tuning."""
_PROCESSOR = "processor_s.txt"
"""File in a run directory: its processor time over all processes."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Cost of one step of a control, in RL steps."""

    seconds: float = 1.0
    sampled_tokens: float = 1.0


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, and what its training after mid-training cost."""

    checkpoint: Path
    train_s: float = 0.0
    sampled_tokens: float = 0.0
    rl_steps: int = 0
    processor_s: float = 0.0
    """Processor time of a run from mid-trained weights, including its sandboxes; 0: not measured."""

    def figures(self) -> dict[str, float]:
        names = ("train_s", "sampled_tokens", "rl_steps", "processor_s")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Reference:
    """A finished RL run, from which controls start and with which they are compared."""

    run: RunDirectory
    report: Mapping[str, Any]
    timing: Mapping[str, Any]
    """`stages` and `throughput` from the report of a run on an idle machine; time budgets follow from it."""

    @property
    def trained(self) -> Trained:
        """The run's final model."""
        return _trained(self.run, self.report)

    @property
    def behaviour(self) -> dict[str, Any]:
        """From the run's report: tool calls per turn, and the figures of the family `observed`."""
        when = {name: self.report.get(f"behaviour_{name}", {}) for name in ("before", "after")}
        found = {f"calls_per_turn_{name}": facts.get("calls_per_turn") for name, facts in when.items()}
        observed = self.report.get("families", {}).get("observed", {}).get("after", {})
        names = ("first_edit_ceiling", "masked_ablation")
        return found | {f"observed_{name}": observed[name] for name in names if name in observed}

    def derive_config(self, name: str, *changes: str) -> RunConfig:
        """The run's configuration with changes, for a run directory next to it."""
        names = (f'name="{self.run.name}-{name}"', f'runs_directory="{self.run.path.parent}"')
        return load_config(self.run.path / "config.toml", (*names, *_LIGHT, *changes))

    def after_midtraining(self, name: str, *changes: str) -> RunConfig:
        """As `derive_config`, starting from the mid-trained weights from which RL started."""
        return self.derive_config(name, f'initial_checkpoint="{self.run.checkpoints / MIDTRAINED}"', *changes)


Train = Callable[[Reference, "Recipe", int, Pace], dict[str, Trained]]
"""(RL run, recipe, index of its settings, pace) -> budget (`wall`, `tokens`) -> model. Both budgets may have
the same model; `tokens` is absent where nothing is sampled."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to train a model within a budget."""

    name: str
    title: str
    trials: tuple[tuple[str, ...], ...]
    """Settings to choose from, each as overrides of the configuration."""
    train: Train


def begin_reference(
    config: Path, runs: Path, seed: int, settings: Sequence[str], timing: Mapping[str, Any] | None
) -> Reference:
    """The RL run with this seed: a whole run from random weights. Without `timing` it uses its own."""
    place = (f'name="seed-{seed}"', f'runs_directory="{runs}"', f"seed={seed}")
    run, report = _finish(load_config(config, (*place, *_FEW, *settings)))
    own = {name: report[name] for name in ("stages", "throughput")}
    return Reference(run, report, timing or own)


def _finish(config: RunConfig) -> tuple[RunDirectory, dict[str, Any]]:
    """Runs, resumes or reads the run of `config`: (run, report)."""
    directory = Path(config.runs_directory) / config.name
    exists = directory.exists()
    run = RunDirectory.open(directory) if exists else RunDirectory.create(config)
    began, file = _processor_s(), run.path / _PROCESSOR
    try:
        return run, train(run.config, run, SilentObserver(), resume=exists)
    finally:
        before = float(file.read_text()) if file.exists() else 0.0
        file.write_text(f"{before + _processor_s() - began:.3f}\n", encoding="utf-8")


def _processor_s() -> float:
    """Processor time of this process and its finished children."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _trained(run: RunDirectory, report: Mapping[str, Any]) -> Trained:
    tokens = sum(_num_sampled(part) for part in _parts(run))
    train_s = report["stages"].get("rl_s", 0.0)
    began_midtrained = run.config.initial_checkpoint is not None
    processor_s = float((run.path / _PROCESSOR).read_text()) if began_midtrained else 0.0
    return Trained(run.checkpoints / FINAL, train_s, tokens, report["rl_steps"], processor_s)


def _parts(run: RunDirectory) -> list[list[Group]]:
    """The groups of each RL step, dropped ones included."""
    log = TrajectoryLog(run.trajectories)
    return [list(log.read_part(part)) for part in log.part_names()]


def _num_sampled(groups: Sequence[Group]) -> float:
    return float(sum(member.num_sampled_tokens for group in groups for member in group.members))


def train_on_policy(reference: Reference, recipe: Recipe, number: int, pace: Pace) -> dict[str, Trained]:
    """The RL loop with other settings, from the same initial weights: one model for as many steps as take
    RL's time, one for as many as sample RL's tokens."""
    rl_steps, found = reference.report["rl_steps"], dict[str, Trained]()
    for budget, step in (("wall", pace.seconds), ("tokens", pace.sampled_tokens)):
        steps = max(1, round(rl_steps / step))
        name = f"{recipe.name}-{number}-{steps}"
        config = reference.after_midtraining(name, f"rl.num_steps={steps}", *recipe.trials[number])
        found[budget] = _trained(*_finish(config))
    return found


def train_rl(reference: Reference, recipe: Recipe, number: int, pace: Pace) -> dict[str, Trained]:
    """RL with other settings; the first settings are those of the reference itself."""
    return {"wall": reference.trained} if number == 0 else train_on_policy(reference, recipe, number, pace)


def train_midtraining(reference: Reference, recipe: Recipe, number: int, pace: Pace) -> dict[str, Trained]:
    """Mid-training only, for the time of mid-training and RL together, with a stretched schedule."""
    stages, settings = reference.timing["stages"], reference.run.config.midtrain
    steps = round(settings.num_steps * (1.0 + stages["rl_s"] / stages["midtrain_s"]))
    changes = (f"midtrain.num_steps={steps}", "rl.num_steps=0", *recipe.trials[number])
    run, report = _finish(reference.derive_config(f"{recipe.name}-{number}-{steps}", *changes))
    return {"wall": Trained(run.checkpoints / FINAL, report["stages"]["midtrain_s"] - stages["midtrain_s"])}


def train_rejection_once(reference: Reference, recipe: Recipe, number: int, pace: Pace) -> dict[str, Trained]:
    """Rejection fine-tuning: samples sessions with RL's initial weights and fine-tunes on the solved ones,
    half of RL's time each; or with as many sampled and trained tokens as RL had."""
    rl, throughput = reference.trained, reference.timing["throughput"]
    steps = f"rl.num_steps={rl.rl_steps}"
    config = reference.after_midtraining("samples", steps, "rl.optimizer.learning_rate=0")
    run, _ = _finish(config)
    parts = _parts(run)
    sampled = [_num_sampled(part) for part in parts]
    half_s, trained_in_rl = throughput["elapsed_s"] / 2, throughput["training_tokens"]
    rollout_s = throughput["rollout_s"] / rl.rl_steps
    budgets = {
        "wall": (_num_within([rollout_s] * len(parts), half_s), half_s * throughput["training_tokens_per_s"]),
        "tokens": (_num_within(sampled, rl.sampled_tokens), trained_in_rl),
    }
    settings, found = reference.derive_config("unused", *recipe.trials[number]), dict[str, Trained]()
    for budget, (num_steps, num_tokens) in budgets.items():
        checkpoint = run.checkpoints / f"{recipe.name}-{number}-{budget}"
        if not checkpoint.exists():
            documents = [one for part in parts[:num_steps] for one in solved_sessions(part)]
            fine_tune(reference.run.checkpoints / MIDTRAINED, documents, settings, num_tokens, checkpoint)
        took_s = num_steps * rollout_s + float((checkpoint / _SECONDS).read_text())
        found[budget] = Trained(checkpoint, took_s, sum(sampled[:num_steps]), num_steps)
    return found


def _num_within(costs: Sequence[float], budget: float) -> int:
    """Length of the longest prefix of `costs` that fits into the budget; at least 1."""
    return max(1, int(np.searchsorted(np.cumsum(costs), budget * (1 + 1e-9), side="right")))


def solved_sessions(groups: Sequence[Group]) -> list[Document]:
    """Every solved session as a document; the loss covers the agent's tokens."""
    return [
        Document(segment.tokens, segment.sampled.astype(np.float32), segment.sampled)
        for group in groups
        for member in group.members
        if member.reward is not None and member.reward.task == 1.0
        for segment in member.segments
    ]


def fine_tune(
    source: Path, documents: Sequence[Document], config: RunConfig, num_tokens: float, directory: Path
) -> None:
    """Fine-tunes with AdamW at RL's peak rate on `num_tokens` of the documents; saves a checkpoint."""
    began, model, midtrain = time.monotonic(), load_model(source), config.midtrain
    rates = {"matrix_optimizer": "adamw", "learning_rate": config.rl.optimizer.learning_rate}
    changes = {
        "num_steps": max(1, round(num_tokens / midtrain.tokens_per_step)),
        "optimizer": midtrain.optimizer.model_copy(update=rates),
    }
    settings = midtrain.model_copy(update=changes)
    if documents:
        stream = ShuffledDocuments(list(documents), settings.tokens_per_step, config.seed)
        trainer = NextTokenTrainer(model, stream, settings)
        for _ in range(settings.num_steps):
            trainer.step()

    def write_more(place: Path) -> None:
        Tokenizer.load(source).save(place)
        (place / _SECONDS).write_text(f"{time.monotonic() - began:.3f}\n", encoding="utf-8")

    save_checkpoint(directory, model, write_more=write_more)


def _rates(key: str, *values: float) -> tuple[tuple[str, ...], ...]:
    return tuple((f"{key}={value}",) for value in values)


_RL_RATE = "rl.optimizer.learning_rate"
_ON_POLICY_RATES = _rates(_RL_RATE, 1e-3, 5e-4, 2e-3)

RL = Recipe("rl", "RL", _rates(_RL_RATE, 5e-4, 3e-4, 8e-4), train_rl)

CONTROLS = (
    Recipe(
        "midtraining",
        "more mid-training",
        _rates("midtrain.optimizer.matrix_learning_rate", 0.02, 0.01, 0.04),
        train_midtraining,
    ),
    Recipe(
        "midtraining_mix",
        "more mid-training, the best of three mixes",
        (
            ("midtrain.num_fix_documents=4000", "midtrain.num_rewrite_documents=2500"),
            ("midtrain.num_fix_documents=4000", "midtrain.num_sessions=9000"),
            ("midtrain.num_rewrite_documents=2500", "midtrain.num_sessions=9000"),
        ),
        train_midtraining,
    ),
    Recipe(
        "rejection_once",
        "rejection sampling once",
        _rates(_RL_RATE, 1e-3, 3e-4, 3e-3),
        train_rejection_once,
    ),
    Recipe(
        "rejection",
        "on-policy rejection sampling, all solved sessions",
        tuple((*one, 'rl.algorithm="rejection_sampling"') for one in _ON_POLICY_RATES),
        train_on_policy,
    ),
    Recipe(
        "best_of_group",
        "on-policy rejection sampling, each group's best by total reward",
        tuple((*one, 'rl.algorithm="best_of_group"') for one in _ON_POLICY_RATES),
        train_on_policy,
    ),
)
