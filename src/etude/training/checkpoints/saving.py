"""One checkpoint: a model, and the state that training resumes from.

    one process     config.json, model.safetensors, state.pt         a Hugging Face directory
    several ranks   config.json, shards/, state.pt                   see `shards`

Any number of processes can read either form.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from etude.errors import CheckpointError
from etude.kit.durable import recover_directory
from etude.model import DraftLayers, LanguageModel, build_model
from etude.model.huggingface.fields import read_fields, write_fields
from etude.model.loading import AnyModel, load_any_model, save_any_model
from etude.training.checkpoints.files import (
    begin,
    check_whole,
    commit,
    partial_of,
    seal,
    translate_full_disk,
    write_whole,
)
from etude.training.checkpoints.shards import (
    ModelShards,
    Shards,
    has_shards,
    join_shards,
    run_on_all_ranks,
    split_shards,
)
from etude.training.checkpoints.token_ids import copy_token_ids

STATE = "state.pt"
_CONFIG = "config.json"
_MODEL_KEY, _STATE_KEY = "model", "state"
_WriteMore = Callable[[Path], object]
WriteCheckpoint = Callable[[Path, AnyModel | ModelShards | None, Mapping[str, Any]], None]
"""Writes a checkpoint, synchronously or not: `save_checkpoint`, or `CheckpointKeeper.write`."""
StoredCheckpoint = tuple[AnyModel | ModelShards | None, dict[str, Any] | None]
"""The contents of a checkpoint: the model, unless it holds adapters alone; tensors and plain values, if
training can resume from it."""


def save_checkpoint(
    directory: Path,
    model: AnyModel | ModelShards | None,
    state: Mapping[str, Any] | None = None,
    write_more: _WriteMore | None = None,
    retire: Callable[[Path], object] = shutil.rmtree,
    drafts: DraftLayers | None = None,
) -> None:
    """Writes a Hugging Face directory that includes `state` (tensors and plain values) and `drafts` if given.

    Without a model, only the state is written: for adapters, whose base model is stored separately.
    `write_more` adds files of the caller's, such as the tokenizer's, to the directory it is given. The token
    ids in its generation_config.json are copied into config.json too.
    Everything is written, hashed and synced under another name first: `directory` exists only when it is
    complete. An older checkpoint of that name is renamed and passed to `retire`.
    Raises ResourceError where the disk is full; the older one then stays.

    Of ModelShards every rank writes its own, and the shards in its `state`; all ranks call this together. The
    rest of `state`, `write_more` and `retire` are the first rank's; those of other ranks are ignored. An
    error on any rank is raised on all, see `run_on_all_ranks`.
    """
    if isinstance(model, ModelShards):
        _save_shards(directory, model, state, write_more, retire)
        return

    def fill(partial: Path) -> None:
        if model is not None:
            save_any_model(model, partial, drafts)
        _write_rest(partial, state, write_more)

    write_whole(directory, fill, retire)


def _save_shards(
    directory: Path,
    model: ModelShards,
    state: Mapping[str, Any] | None,
    write_more: _WriteMore | None,
    retire: Callable[[Path], object],
) -> None:
    from etude.training.checkpoints.shard_files import write_shards

    group, partial = model.group, partial_of(directory)
    shards, rest = split_shards({_MODEL_KEY: model.weights, _STATE_KEY: state or {}})
    is_first = group.rank() == 0

    def prepare() -> None:
        with translate_full_disk(directory):
            begin(directory)
            if model.config is not None:
                dtype = model.weights["embedding"].dtype
                text = write_fields(model.config, model.vocab_size, dtype)
                (partial / _CONFIG).write_text(text, encoding="utf-8")
            _write_rest(partial, None if state is None else rest[_STATE_KEY], write_more)

    def finish(digests: Mapping[str, str]) -> None:
        with translate_full_disk(directory):
            seal(partial, digests)
            commit(directory, retire)

    try:
        run_on_all_ranks(group, prepare if is_first else lambda: None)
        digests = write_shards(partial, shards, group)
        run_on_all_ranks(group, lambda: finish(digests) if is_first else None)
    except BaseException:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_rest(partial: Path, state: Mapping[str, Any] | None, write_more: _WriteMore | None) -> None:
    if state is not None:
        # Through our own file object: PyTorch's does not report a full disk.
        with (partial / STATE).open("wb") as file:
            torch.save(dict(state), file)
    if write_more is not None:
        write_more(partial)
        if (partial / _CONFIG).is_file():
            copy_token_ids(partial, partial)


def has_checkpoint(directory: Path) -> bool:
    """Whether `directory` holds a checkpoint; first restores one that an interrupted save had renamed."""
    recover_directory(directory)
    return directory.exists()


def load_checkpoint(directory: Path) -> tuple[AnyModel, dict[str, Any] | None]:
    """The model and the state of a checkpoint, unsharded. Raises CheckpointError if a file is missing or
    damaged, or if it holds no model."""
    model, state = load_stored(directory)
    if model is None:
        raise CheckpointError(
            "holds adapters only",
            field="checkpoint",
            received=str(directory),
            fix="etude checkpoint export merges them with the model that they were trained on",
        )
    assert not isinstance(model, ModelShards)
    return model, state


def load_state(directory: Path) -> dict[str, Any] | None:
    """The state of a checkpoint; None if it has none. Raises CheckpointError if a file is missing or
    damaged."""
    recover_directory(directory)
    check_whole(directory)
    state = read_state(directory)
    if state is None or not has_shards(directory):
        return state
    return _read_split(directory, state)[1]


def load_stored(
    directory: Path,
    like: AnyModel | ModelShards | None = None,
    state_like: Mapping[str, Any] | None = None,
) -> StoredCheckpoint:
    """The contents of a checkpoint. Raises CheckpointError if a file is missing or damaged.

    On several ranks, all call it with ModelShards and a state that are sharded as the result is to be; if
    one process wrote the checkpoint, the result is unsharded. State tensors that `state_like` lacks, or has
    in another shape or type, come without values, on the device `meta`. An error on any rank is raised on
    all. With `like`, also raises CheckpointError if the model is of another architecture.
    """
    if isinstance(like, ModelShards):
        return _load_parts(directory, like, state_like or {})
    recover_directory(directory)
    check_whole(directory)
    return _load_whole(directory, like)


def _load_parts(directory: Path, like: ModelShards, state_like: Mapping[str, Any]) -> StoredCheckpoint:
    """This rank's shards; see `load_stored`."""
    group = like.group
    is_first = group.rank() == 0
    run_on_all_ranks(group, lambda: recover_directory(directory) if is_first else None)
    run_on_all_ranks(group, lambda: check_whole(directory, group.rank(), group.size()))
    if not has_shards(directory):
        found: list[StoredCheckpoint] = []
        run_on_all_ranks(group, lambda: found.append(_load_whole(directory, like)))
        return found[0]
    run_on_all_ranks(group, lambda: _check_shards(directory, like))
    wanted, _ = split_shards({_MODEL_KEY: like.weights, _STATE_KEY: state_like})
    weights, state = _read_split(directory, read_state(directory), wanted, group)
    if not weights:
        return None, state
    fields = read_fields(directory / _CONFIG)
    return ModelShards(fields.config, fields.vocab_size, weights, group), state


def _load_whole(directory: Path, like: AnyModel | ModelShards | None) -> StoredCheckpoint:
    """The whole checkpoint in this process, however many processes wrote it."""
    state, model = read_state(directory), None
    if has_shards(directory):
        weights, state = _read_split(directory, state)
        model = _assemble(directory, weights)
    elif (directory / _CONFIG).is_file():
        model = load_any_model(directory)
    if model is not None and like is not None:
        _check_architecture(model.config, model.vocab_size, like)
    return model, state


def _check_shards(directory: Path, like: ModelShards) -> None:
    if like.config is not None:
        fields = read_fields(directory / _CONFIG)
        _check_architecture(fields.config, fields.vocab_size, like)


def _check_architecture(config: object, vocab_size: int, like: AnyModel | ModelShards) -> None:
    if (config, vocab_size) != (like.config, like.vocab_size):
        raise CheckpointError(
            "has another architecture than the run",
            field="checkpoint",
            received=config,
            fix="continue with the configuration that the run started with",
        )


def _read_split(
    directory: Path,
    rest: Mapping[str, Any] | None,
    like: Shards | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Shards, dict[str, Any] | None]:
    """Reads the shards of a checkpoint with `read_shards`; returns the model's weights, and the state, whose
    plain values are `rest`."""
    from etude.training.checkpoints.shard_files import read_shards

    tree = join_shards({_STATE_KEY: rest or {}}, read_shards(directory, like, group))
    return tree.get(_MODEL_KEY, {}), None if rest is None else tree[_STATE_KEY]


def _assemble(directory: Path, weights: Shards) -> LanguageModel | None:
    """A model from unsharded weights; None if there are none."""
    if not weights:
        return None
    fields = read_fields(directory / _CONFIG)
    model = build_model(fields.config, fields.vocab_size)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise CheckpointError(
            "its shards do not match its config.json", field="checkpoint", received=str(directory)
        )
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    return model.cast(torch.float32)


def read_state(directory: Path) -> dict[str, Any] | None:
    """`load_state` without checking hashes and without sharded tensors; the others are mapped, and so read
    from disk when they are used.

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
