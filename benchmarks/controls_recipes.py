"""What benchmarks/controls.py compares: RL, and other uses of the same time or the same sampled tokens."""

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
"""Controls are judged by the script, and need no evaluation of their own."""
_FEW = ("evaluation.num_tasks=96", "evaluation.num_family_tasks=1", "evaluation.num_repeated_tasks=1")
"""RL's own evaluation is for its behaviour and for what masking does to it."""
_SECONDS = "seconds.txt"
"""File of a checkpoint: how long its fine-tuning took."""
_PROCESSOR = "processor_s.txt"
"""File of a run: what it took of processors, in all sittings."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What one step of a control takes, in steps of RL."""

    seconds: float = 1.0
    sampled_tokens: float = 1.0


@dataclass(frozen=True, slots=True)
class Trained:
    """A model, and what it took after mid-training."""

    checkpoint: Path
    train_s: float = 0.0
    sampled_tokens: float = 0.0
    rl_steps: int = 0
    processor_s: float = 0.0
    """Of a run that began with mid-trained weights, its sandboxes included; 0 where that was not measured."""

    def figures(self) -> dict[str, float]:
        names = ("train_s", "sampled_tokens", "rl_steps", "processor_s")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Reference:
    """A finished run of RL."""

    run: RunDirectory
    report: Mapping[str, Any]
    timing: Mapping[str, Any]
    """`stages` and `throughput` of the report of a run on an idle machine: budgets of time follow from it."""

    @property
    def trained(self) -> Trained:
        """The run's final model."""
        return _trained(self.run, self.report)

    @property
    def behaviour(self) -> dict[str, Any]:
        """From the run's report: tool calls per turn, and what it says of the family `observed`."""
        when = {name: self.report.get(f"behaviour_{name}", {}) for name in ("before", "after")}
        found = {f"calls_per_turn_{name}": facts.get("calls_per_turn") for name, facts in when.items()}
        observed = self.report.get("families", {}).get("observed", {}).get("after", {})
        names = ("first_edit_ceiling", "masked_ablation")
        return found | {f"observed_{name}": observed[name] for name in names if name in observed}

    def beside(self, name: str, *changes: str) -> RunConfig:
        """The run's configuration with changes, in a directory beside it."""
        names = (f'name="{self.run.name}-{name}"', f'runs_directory="{self.run.path.parent}"')
        return load_config(self.run.path / "config.toml", (*names, *_LIGHT, *changes))

    def after_midtraining(self, name: str, *changes: str) -> RunConfig:
        """The same, which begins with the weights that RL began with."""
        return self.beside(name, f'initial_checkpoint="{self.run.checkpoints / MIDTRAINED}"', *changes)


Train = Callable[[Reference, "Recipe", int, Pace], dict[str, Trained]]
"""(run of RL, recipe, number of its settings, pace) -> budget (`wall`, `tokens`) -> model. Both budgets may
name the same model; `tokens` is absent where nothing is sampled."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to spend the time."""

    name: str
    title: str
    trials: tuple[tuple[str, ...], ...]
    """Settings to choose from, each as overrides of the configuration."""
    train: Train


def begin_reference(
    config: Path, runs: Path, seed: int, settings: Sequence[str], timing: Mapping[str, Any] | None
) -> Reference:
    """The run of RL with this seed: a whole run from nothing. Without `timing` it has its own."""
    place = (f'name="seed-{seed}"', f'runs_directory="{runs}"', f"seed={seed}")
    run, report = _finish(load_config(config, (*place, *_FEW, *settings)))
    own = {name: report[name] for name in ("stages", "throughput")}
    return Reference(run, report, timing or own)


def _finish(config: RunConfig) -> tuple[RunDirectory, dict[str, Any]]:
    """A run and its report. One that was begun goes on, one that is finished is read."""
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
    """Of this process and of those that it has waited for."""
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
    """The loop of RL with other settings, from the weights that it began with: as many of its steps as take
    the time of RL, and as many as sample the tokens of RL."""
    rl_steps, found = reference.report["rl_steps"], dict[str, Trained]()
    for budget, step in (("wall", pace.seconds), ("tokens", pace.sampled_tokens)):
        steps = max(1, round(rl_steps / step))
        name = f"{recipe.name}-{number}-{steps}"
        config = reference.after_midtraining(name, f"rl.num_steps={steps}", *recipe.trials[number])
        found[budget] = _trained(*_finish(config))
    return found


def train_rl(reference: Reference, recipe: Recipe, number: int, pace: Pace) -> dict[str, Trained]:
    """RL with other settings; the first are those of the run itself."""
    return {"wall": reference.trained} if number == 0 else train_on_policy(reference, recipe, number, pace)


def train_midtraining(reference: Reference, recipe: Recipe, number: int, pace: Pace) -> dict[str, Trained]:
    """From nothing, mid-training for the time of mid-training and RL together; the schedule is stretched."""
    stages, settings = reference.timing["stages"], reference.run.config.midtrain
    steps = round(settings.num_steps * (1.0 + stages["rl_s"] / stages["midtrain_s"]))
    changes = (f"midtrain.num_steps={steps}", "rl.num_steps=0", *recipe.trials[number])
    run, report = _finish(reference.beside(f"{recipe.name}-{number}-{steps}", *changes))
    return {"wall": Trained(run.checkpoints / FINAL, report["stages"]["midtrain_s"] - stages["midtrain_s"])}


def train_rejection_once(reference: Reference, recipe: Recipe, number: int, pace: Pace) -> dict[str, Trained]:
    """Sessions of the weights that RL began with, then fine-tuning on those that were solved: half of RL's
    time each; or as many sampled tokens as RL had, and as many trained ones."""
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
    settings, found = reference.beside("unused", *recipe.trials[number]), dict[str, Trained]()
    for budget, (num_steps, num_tokens) in budgets.items():
        checkpoint = run.checkpoints / f"{recipe.name}-{number}-{budget}"
        if not checkpoint.exists():
            documents = [one for part in parts[:num_steps] for one in solved_sessions(part)]
            fine_tune(reference.run.checkpoints / MIDTRAINED, documents, settings, num_tokens, checkpoint)
        took_s = num_steps * rollout_s + float((checkpoint / _SECONDS).read_text())
        found[budget] = Trained(checkpoint, took_s, sum(sampled[:num_steps]), num_steps)
    return found


def _num_within(costs: Sequence[float], budget: float) -> int:
    """How many of the first costs fit into a budget, at least one."""
    return max(1, int(np.searchsorted(np.cumsum(costs), budget * (1 + 1e-9), side="right")))


def solved_sessions(groups: Sequence[Group]) -> list[Document]:
    """Every solved session; what the agent wrote counts."""
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
    """AdamW at RL's peak rate over so many tokens of the documents; saves a checkpoint with its tokenizer."""
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
