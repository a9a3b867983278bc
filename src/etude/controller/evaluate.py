"""Evaluating a checkpoint of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from etude.config import RunConfig
from etude.controller.compute import settle_evaluation, use_sampling_threads
from etude.controller.families import open_family
from etude.controller.parts import open_parts
from etude.controller.train import CURVE, FINAL, MIDTRAINED, TOKENIZER
from etude.errors import RunDirectoryError
from etude.evaluation import Evaluation, evaluate_policy
from etude.model.loading import AnyModel
from etude.observe import Observer, RunDirectory
from etude.records import Task
from etude.tokens.tokenizer import Tokenizer
from etude.training import load_checkpoint
from etude.training.checkpoints.history import DAMAGED, HISTORY

_SERIES = (CURVE, HISTORY)
"""Directories of many checkpoints."""
_OTHERS = (*_SERIES, DAMAGED)


def evaluate_run(
    run: RunDirectory, split: str, num_tasks: int, checkpoint: str | None, observer: Observer
) -> dict[str, Any]:
    """Figures of one checkpoint (the final one unless named) on frozen tasks of `split`.

    Raises ConfigError for an unknown split, RunDirectoryError for a checkpoint that is not there.
    """
    tasks = open_family(run.config).evaluation_tasks(split, num_tasks)
    tokenizer, model = load_policy(run, checkpoint)
    config = settle_evaluation(run)
    use_sampling_threads(config)
    observer.stage_begins(f"evaluation on {split}", 1)
    evaluation = asyncio.run(_evaluate(config, tasks, tokenizer, model))
    observer.stage_advances(1, {"pass_rate": evaluation.sampled["pass_rate"]})
    observer.stage_ends()
    return {**evaluation.to_json(), "behaviour": evaluation.behaviour}


def load_policy(run: RunDirectory, checkpoint: str | None) -> tuple[Tokenizer, AnyModel]:
    """Tokenizer and model of a run's checkpoint: `final` unless named, before that `midtrained`."""
    names = [checkpoint] if checkpoint else [FINAL, MIDTRAINED]
    for name in names:
        for directory in (run.checkpoints / name, *(run.checkpoints / series / name for series in _SERIES)):
            if directory.exists():
                model, _ = load_checkpoint(directory)
                return Tokenizer.load(_tokenizer_directory(run, directory)), model
    raise RunDirectoryError(
        "no such checkpoint",
        field="checkpoint",
        received=names[0],
        fix=f"one of {', '.join(_names(run)) or 'none'}",
    )


def _names(run: RunDirectory) -> list[str]:
    places = [run.checkpoints, *(run.checkpoints / name for name in _SERIES)]
    directories = [directory for place in places for directory in place.glob("[!.]*")]
    return sorted(directory.name for directory in directories if directory.name not in _OTHERS)


def _tokenizer_directory(run: RunDirectory, checkpoint: Path) -> Path:
    """Beside the weights where a checkpoint is complete by itself, otherwise the run's."""
    if (checkpoint / "tokenizer.json").exists():
        return checkpoint
    initial = run.config.initial_checkpoint
    return Path(initial) if initial is not None else run.path / TOKENIZER


async def _evaluate(
    config: RunConfig, tasks: list[Task], tokenizer: Tokenizer, model: AnyModel
) -> Evaluation:
    async with open_parts(config, tokenizer, model) as parts:
        await parts.serve(model, config.name)
        return await evaluate_policy(
            parts.environment, parts.service, tasks, "eval", config.seed, config.engine.num_slots
        )
