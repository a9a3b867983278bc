"""The policy of a run: tokenizer and model of one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from etude.controller.train import CURVE, FINAL, MIDTRAINED, TOKENIZER
from etude.errors import RunDirectoryError
from etude.model.loading import AnyModel
from etude.observe import RunDirectory
from etude.tokens.tokenizer import Tokenizer
from etude.training import load_checkpoint
from etude.training.checkpoints.history import DAMAGED, HISTORY

_SERIES = (CURVE, HISTORY)
"""Directories of many checkpoints."""
_OTHERS = (*_SERIES, DAMAGED)


def load_policy(run: RunDirectory, checkpoint: str | None) -> tuple[Tokenizer, AnyModel]:
    """Tokenizer and model of a run's checkpoint: `final` unless named, before that `midtrained`."""
    directory = find_checkpoint(run, checkpoint)
    model, _ = load_checkpoint(directory)
    return Tokenizer.load(_tokenizer_directory(run, directory)), model


def find_checkpoint(run: RunDirectory, checkpoint: str | None) -> Path:
    """The directory of that checkpoint. Raises RunDirectoryError where there is none."""
    names = [checkpoint] if checkpoint else [FINAL, MIDTRAINED]
    for name in names:
        for directory in (run.checkpoints / name, *(run.checkpoints / series / name for series in _SERIES)):
            if directory.exists():
                return directory
    known = ", ".join(_names(run)) or "none"
    if checkpoint is None:
        raise RunDirectoryError(
            "has no trained model yet: its mid-training has not ended",
            field="run",
            received=str(run.path),
            fix=f"end it with `etude train ... --resume`; resumable checkpoints so far: {known}",
        )
    raise RunDirectoryError(
        "no such checkpoint", field="checkpoint", received=checkpoint, fix=f"one of {known}"
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
