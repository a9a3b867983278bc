"""Loads tokenizer and model from a path: a checkpoint, or a run and one of its checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path

from etude.controller.stored import tokenizer_directory
from etude.errors import CheckpointError, ConfigError, RunDirectoryError
from etude.model import LanguageModel
from etude.model.huggingface.fields import read_fields
from etude.model.loading import AnyModel, load_any_model
from etude.observe import RunDirectory
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.training import load_checkpoint
from etude.training.checkpoints.history import DAMAGED, HISTORY

MIDTRAINED = "midtrained"
FINAL = "final"
CURVE = "curve"
_SERIES = (CURVE, HISTORY)
"""Directories of series of checkpoints."""
_OTHERS = (*_SERIES, DAMAGED)


def load_any(
    directory: Path, field: str, *, with_tokenizer: bool = True
) -> tuple[Tokenizer | None, AnyModel]:
    """Tokenizer and model of a Hugging Face directory, or of a run's last checkpoint.

    Raises CheckpointError, RunDirectoryError; `field`: of the error for a directory that is neither.
    """
    if (directory / "config.json").is_file():
        return Tokenizer.load(directory) if with_tokenizer else None, load_any_model(directory)
    if (directory / "config.toml").is_file():
        return load_policy(RunDirectory.open(directory), None)
    raise CheckpointError(
        "is not a model directory: it has neither config.json nor a run's config.toml",
        field=field,
        received=str(directory),
        fix="name a Hugging Face checkpoint directory, or a run directory",
    )


def load_own(directory: Path, field: str) -> tuple[Tokenizer, LanguageModel]:
    """As `load_any`, for Étude's engine. Raises CheckpointError, ConfigError for other architectures."""
    if (directory / "config.json").is_file():
        read_fields(directory / "config.json")  # before anything large is read
    tokenizer, model = load_any(directory, field)
    assert tokenizer is not None, "asked for"
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            "Étude's engine does not support this architecture",
            field=field,
            received=str(directory),
            fix="serve the run's checkpoint with vLLM",
        )
    return tokenizer, model


def load_policy(run: RunDirectory, checkpoint: str | None) -> tuple[Tokenizer, AnyModel]:
    """Tokenizer and model of a run's checkpoint; by default `final`, else `midtrained`."""
    directory = find_checkpoint(run, checkpoint)
    model, _ = load_checkpoint(directory)
    has_own = (directory / TOKENIZER_FILE).exists()
    return Tokenizer.load(directory if has_own else tokenizer_directory(run)), model


def find_checkpoint(run: RunDirectory, checkpoint: str | None) -> Path:
    """The directory of that checkpoint. Raises RunDirectoryError where there is none."""
    names = [checkpoint] if checkpoint else [FINAL, MIDTRAINED]
    for name in names:
        for directory in (run.checkpoints / name, *(run.checkpoints / series / name for series in _SERIES)):
            if directory.exists():
                if checkpoint is None and name == MIDTRAINED:
                    warnings.warn(
                        f"{run.path} has not ended: this is its checkpoint {name}, from before RL",
                        stacklevel=1,
                    )
                return directory
    known = ", ".join(_names(run)) or "none"
    if checkpoint is None:
        raise RunDirectoryError(
            "has no trained model yet: its training has not finished",
            field="run",
            received=str(run.path),
            fix=f"wait for its end, continue it with --resume, or make a model of its newest checkpoint "
            f"with `etude checkpoint export {run.path} DIR` (it has: {known})",
        )
    raise RunDirectoryError(
        "no such checkpoint", field="checkpoint", received=checkpoint, fix=f"one of {known}"
    )


def _names(run: RunDirectory) -> list[str]:
    places = [run.checkpoints, *(run.checkpoints / name for name in _SERIES)]
    directories = [directory for place in places for directory in place.glob("[!.]*")]
    return sorted(directory.name for directory in directories if directory.name not in _OTHERS)
