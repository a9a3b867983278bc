"""One checkpoint: a model as a Hugging Face directory, and beside it what training needs to go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from etude.errors import CheckpointError
from etude.model.loading import AnyModel, load_any_model, save_any_model
from etude.training.checkpoints.files import check_whole, recover, write_whole

STATE = "state.pt"


class WriteCheckpoint(Protocol):
    """Writes a checkpoint, now or soon: `save_checkpoint`, or `CheckpointKeeper.write`."""

    def __call__(
        self, directory: Path, model: AnyModel | None, state: Mapping[str, Any] | None = None
    ) -> None: ...


def save_checkpoint(
    directory: Path,
    model: AnyModel | None,
    state: Mapping[str, Any] | None = None,
    write_more: Callable[[Path], object] | None = None,
    retire: Callable[[Path], object] = shutil.rmtree,
) -> None:
    """Writes a Hugging Face directory, and beside it `state` (tensors and plain values) if given.

    Without a model there is the state alone: that of adapters to a model which lies elsewhere.
    `write_more` adds files of the caller's, such as the tokenizer's: it gets the directory to write to.
    Everything is written, hashed and synced under another name first: `directory` exists only when it is
    whole. An older checkpoint of that name is replaced, and given to `retire` under another name.
    Raises ResourceError where the disk is full; the older one then stays.
    """

    def fill(partial: Path) -> None:
        if model is not None:
            save_any_model(model, partial)
        if state is not None:
            # By a file of ours: PyTorch's own tells of no full disk.
            with (partial / STATE).open("wb") as file:
                torch.save(dict(state), file)
        if write_more is not None:
            write_more(partial)

    write_whole(directory, fill, retire)


def has_checkpoint(directory: Path) -> bool:
    """Whether there is something for `load_checkpoint`, if only what an interrupted save left of the last."""
    recover(directory)
    return directory.exists()


def load_checkpoint(directory: Path) -> tuple[AnyModel, dict[str, Any] | None]:
    """The model and the state of a checkpoint. Raises CheckpointError if a file is missing or damaged, or if
    it holds no model."""
    recover(directory)
    check_whole(directory)
    return load_any_model(directory), read_state(directory)


def load_state(directory: Path) -> dict[str, Any] | None:
    """What lies beside the model, None if nothing does. Raises CheckpointError if a file is missing or
    damaged."""
    recover(directory)
    check_whole(directory)
    return read_state(directory)


def read_state(directory: Path) -> dict[str, Any] | None:
    """`load_state` without looking at hashes: its tensors are read from disk when they are used.

    Raises CheckpointError if it cannot be read.
    """
    path = directory / STATE
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # whatever unpickling a damaged file raises
        raise CheckpointError(
            f"cannot be read: {error}", field="checkpoint", received=str(path), fix="use an older checkpoint"
        ) from error
