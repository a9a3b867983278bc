"""Reading and writing of sharded checkpoint files.

    each rank: parts ──torch.distributed.checkpoint──> shards/shard-00002-model-….safetensors ──> their hashes
    later, with another number of ranks or another sharding: each rank reads its rows out of those files

The files are safetensors, not the pickles that torch.distributed.checkpoint writes by default: reading a
checkpoint runs no code of its writer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from etude.errors import StoreError
from etude.training.checkpoints.files import digest_of, is_full_disk, translate_full_disk
from etude.training.checkpoints.shards import SHARDS, Shards, lost_rank, run_on_all_ranks

FILE_BYTES = 1 << 30
"""About the size of a file; a rank holds one of them in memory while it writes it."""


def part_on_host(shard: DTensor) -> DTensor:
    """A copy of the shard whose local part is in host memory."""
    return _with_part(shard, shard.to_local().detach().to("cpu", copy=True))


def write_shards(directory: Path, shards: Shards, group: dist.ProcessGroup) -> dict[str, str]:
    """Writes this rank's parts into the checkpoint at `directory`; returns the hashes of all ranks' files.

    Collective. Raises ResourceError where a disk is full, StoreError where writing fails otherwise, and
    RankError.
    """
    writer = HuggingFaceStorageWriter(
        str(directory / SHARDS), _file_numbers(shards, FILE_BYTES * group.size()), save_distributed=True
    )
    with translate_full_disk(directory):
        _collective(lambda: save(dict(shards), storage_writer=writer, process_group=group))
    own = f"shard-{group.rank() + 1:05d}-*"
    hashes = run_on_all_ranks(
        group, lambda: {f"{SHARDS}/{file.name}": digest_of(file) for file in (directory / SHARDS).glob(own)}
    )
    return {name: digest for found in hashes for name, digest in found.items()}


def read_shards(
    directory: Path, like: Shards | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Reads the files of `write_shards`: unsharded without `like`, otherwise sharded like its tensors.

    A tensor that `like` lacks, or has in another shape or type, is not read, and comes as a tensor on `meta`
    with the stored shape and type. Collective with a `group`. Raises StoreError, RankError.
    """
    reader = HuggingFaceStorageReader(str(directory / SHARDS))
    found: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        found[key] = _place(stored, None if like is None else like.get(key), whole=like is None)
    wanted: dict[str, Any] = {key: tensor for key, tensor in found.items() if tensor.device.type != "meta"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended
        _collective(lambda: load(wanted, storage_reader=reader, process_group=group, no_dist=group is None))
    return found


def _place(stored: TensorStorageMetadata, like: Tensor | None, *, whole: bool) -> Tensor:
    """An uninitialised tensor to read a stored one into, or one on `meta`."""
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
    """The number of the file, from 1, of each tensor: about `most_bytes` of whole tensors in each file."""
    numbers: dict[str, int] = {}
    room, number = most_bytes, 1
    for key, tensor in shards.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > room and room < most_bytes:
            room, number = most_bytes, number + 1
        room -= num_bytes
        numbers[key] = number
    return numbers


def _collective(act: Callable[[], object]) -> None:
    """Calls `act`, an operation of torch.distributed.checkpoint; all ranks raise if it fails on any.

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
        raise lost_rank(error) from error
