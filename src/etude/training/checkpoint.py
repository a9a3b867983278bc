"""Checkpoints: whole or not there at all, and checked when they are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from etude.errors import CheckpointError
from etude.model.loading import AnyModel, load_any_model, save_any_model

_STATE = "state.pt"
_DIGESTS = "digests.json"


def save_checkpoint(
    directory: Path,
    model: AnyModel,
    state: Mapping[str, Any] | None = None,
    write_more: Callable[[Path], object] | None = None,
) -> None:
    """Writes a Hugging Face directory, and beside it `state` (tensors and plain values) if given.

    `write_more` adds files of the caller's, such as the tokenizer's: it gets the directory to write to.
    Everything is written and synced under another name first: `directory` exists only when it is whole.
    An older checkpoint of that name is replaced.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    save_any_model(model, partial)
    if state is not None:
        torch.save(dict(state), partial / _STATE)
    if write_more is not None:
        write_more(partial)
    digests = {path.name: _digest(path) for path in sorted(partial.iterdir())}
    (partial / _DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    for path in [*partial.iterdir(), partial]:
        _sync(path)
    if directory.exists():
        old = directory.with_name(f".{directory.name}.old")
        if old.exists():
            shutil.rmtree(old)
        directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old)
    else:
        partial.rename(directory)
    _sync(directory.parent)


def has_checkpoint(directory: Path) -> bool:
    """Whether there is something for `load_checkpoint`, if only what an interrupted save left of the last."""
    recover_checkpoint(directory)
    return directory.exists()


def load_checkpoint(directory: Path) -> tuple[AnyModel, dict[str, Any] | None]:
    """The model and the state of a checkpoint. Raises CheckpointError if a file is missing or damaged."""
    recover_checkpoint(directory)
    path = directory / _DIGESTS
    if not path.exists():
        raise CheckpointError(
            "no checkpoint here", field="checkpoint", received=str(directory), fix="name a whole checkpoint"
        )
    for name, digest in _read_digests(path).items():
        file = directory / name
        if not file.exists() or _digest(file) != digest:
            raise CheckpointError(
                "is damaged", field="checkpoint", received=str(file), fix="resume from an older checkpoint"
            )
    model = load_any_model(directory)
    state_path = directory / _STATE
    state = torch.load(state_path, weights_only=True) if state_path.exists() else None
    return model, state


def recover_checkpoint(directory: Path) -> None:
    """Puts back the older checkpoint if a save was killed between its two renames."""
    old = directory.with_name(f".{directory.name}.old")
    if old.exists() and not directory.exists():
        old.rename(directory)


def _read_digests(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise CheckpointError(
            f"is damaged: {error}",
            field="checkpoint",
            received=str(path),
            fix="resume from an older checkpoint",
        ) from error


def _digest(path: Path) -> str:
    return blake3(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
