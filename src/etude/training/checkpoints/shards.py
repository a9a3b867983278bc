"""Tensors of which every rank writes its part, and reads whatever part it is to have.

    each rank: parts ──torch.distributed.checkpoint──> shards/shard-00002-model-….safetensors ──> their hashes
    later, on another number of ranks, cut otherwise: each rank reads its rows out of those files

Parts are DTensors, which know where they lie in the whole. The files are safetensors, not the pickles that
torch.distributed.checkpoint writes by default: reading a checkpoint runs no code of whoever wrote it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from etude.config import ModelConfig
from etude.errors import EtudeError, RankError, StoreError
from etude.training.checkpoints.files import digest_of, full_disk_named, is_full_disk

SHARDS = "shards"
"""The directory of these files in a checkpoint."""
FILE_BYTES = 1 << 30
"""About the size of a file; a rank holds one of them in memory while it writes it."""
_SEPARATOR = "::"
"""In the paths of shards. Names of parameters have dots, those of adapters slashes."""

T = TypeVar("T")
Shards = Mapping[str, Tensor]
"""DTensors by key."""


@dataclass(frozen=True, slots=True)
class ModelShards:
    """What of a model lies on this rank, and with whom it is written and read."""

    config: ModelConfig | None
    """None: there is no model to store, only the state beside it."""
    vocab_size: int
    weights: Shards
    """By the parameters' names."""
    group: dist.ProcessGroup
    """All ranks. Used for checkpoints alone, by one thread at a time."""

    def state_dict(self) -> Shards:
        """The weights by name."""
        return self.weights


def without_model(stored: object) -> ModelShards | None:
    """For a checkpoint of a state alone, instead of the model that `stored` is: on several ranks, those who
    write it; None in one process."""
    return replace(stored, config=None, weights={}) if isinstance(stored, ModelShards) else None


def split_shards(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Nested mappings -> their DTensors, by path, and all the rest, nested as it was."""
    shards: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, value in tree.items():
        assert _SEPARATOR not in str(name), name
        if isinstance(value, DTensor):
            shards[name] = value
        elif isinstance(value, Mapping):
            found, rest[name] = split_shards(value)
            shards |= {f"{name}{_SEPARATOR}{path}": tensor for path, tensor in found.items()}
        else:
            rest[name] = value
    return shards, rest


def join_shards(rest: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """What `split_shards` has split."""
    tree: dict[str, Any] = {}
    for name, value in rest.items():
        tree[name] = join_shards(value, {}) if isinstance(value, Mapping) else value
    for path, tensor in shards.items():
        *parents, name = path.split(_SEPARATOR)
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = tensor
    return tree


def part_on_host(shard: DTensor) -> DTensor:
    """The same part in memory of its own, on the host."""
    return _with_part(shard, shard.to_local().detach().to("cpu", copy=True))


def together(group: dist.ProcessGroup, act: Callable[[], T]) -> list[T]:
    """Does `act` here, and returns what it returned on each rank. If it fails on any, all raise what it
    raised on the first of these. Collective.

    Raises RankError if a rank is lost, StoreError for what is not an error of ours.
    """
    outcome: tuple[T | None, EtudeError | None]
    try:
        outcome = act(), None
    except EtudeError as error:
        outcome = None, error
    except Exception as error:  # it need not survive the journey to other ranks: its words do
        outcome = None, StoreError(f"failed on rank {group.rank()}: {error!r}", field="checkpoint")
    outcomes: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(outcomes, outcome, group=group)
    except (RuntimeError, ConnectionError) as error:
        raise _lost(error) from error
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def write_shards(directory: Path, shards: Shards, group: dist.ProcessGroup) -> dict[str, str]:
    """Writes this rank's parts into the checkpoint at `directory`; returns the hashes of all ranks' files.

    Collective. Raises ResourceError where a disk is full, StoreError where writing fails otherwise, and
    RankError.
    """
    writer = HuggingFaceStorageWriter(
        str(directory / SHARDS), _file_numbers(shards, FILE_BYTES * group.size()), save_distributed=True
    )
    with full_disk_named(directory):
        _distributed(lambda: save(dict(shards), storage_writer=writer, process_group=group))
    own = f"shard-{group.rank() + 1:05d}-*"
    hashes = together(
        group, lambda: {f"{SHARDS}/{file.name}": digest_of(file) for file in (directory / SHARDS).glob(own)}
    )
    return {name: digest for found in hashes for name, digest in found.items()}


def read_shards(
    directory: Path, like: Shards | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Reads what `write_shards` wrote: whole without `like`, otherwise as parts that lie as those in it.

    What `like` lacks, or has in another shape or type, is not read, and comes as a tensor on `meta`, whose
    shape and type are those stored. Collective with a `group`. Raises StoreError, RankError.
    """
    reader = HuggingFaceStorageReader(str(directory / SHARDS))
    found: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        found[key] = _place(stored, None if like is None else like.get(key), whole=like is None)
    wanted: dict[str, Any] = {key: tensor for key, tensor in found.items() if tensor.device.type != "meta"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what was asked for
        _distributed(lambda: load(wanted, storage_reader=reader, process_group=group, no_dist=group is None))
    return found


def has_shards(directory: Path) -> bool:
    """Whether several ranks have written this checkpoint."""
    return (directory / SHARDS).is_dir()


def num_writers(directory: Path) -> int:
    """How many ranks have written shards of a checkpoint; 0 for one that is whole."""
    return len({file.name.split("-")[1] for file in (directory / SHARDS).glob("shard-*")})


def _place(stored: TensorStorageMetadata, like: Tensor | None, *, whole: bool) -> Tensor:
    """Memory for a stored tensor, or a tensor without any."""
    dtype = stored.properties.dtype
    if whole:
        return torch.empty(stored.size, dtype=dtype)
    if isinstance(like, DTensor) and like.shape == stored.size and like.dtype == dtype:
        return _with_part(like, torch.empty_like(like.to_local(), device="cpu"))
    return torch.empty(stored.size, dtype=dtype, device="meta")


def _with_part(shard: DTensor, part: Tensor) -> DTensor:
    return DTensor.from_local(
        part,
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def _file_numbers(shards: Shards, most_bytes: int) -> dict[str, int]:
    """Which file, from 1, a tensor goes to: about so many bytes of whole tensors in each."""
    numbers: dict[str, int] = {}
    room, number = most_bytes, 1
    for key, tensor in shards.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > room and room < most_bytes:
            room, number = most_bytes, number + 1
        room -= num_bytes
        numbers[key] = number
    return numbers


def _distributed(act: Callable[[], object]) -> None:
    """Does something of torch.distributed.checkpoint's, which all ranks raise if it fails on any.

    Raises OSError for a full disk, otherwise StoreError; RankError if a rank is lost.
    """
    try:
        act()
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if is_full_disk(cause):
                raise cause from None
        ranks = ", ".join(map(str, sorted(error.failures)))
        raise StoreError(f"failed on rank {ranks}: {causes[0]!r}", field="checkpoint") from causes[0]
    except (RuntimeError, ConnectionError) as error:
        raise _lost(error) from error


def _lost(error: Exception) -> RankError:
    return RankError(
        f"a rank is gone or too late: {error}",
        field="checkpoint",
        fix="go on from the last checkpoint with --resume",
    )
