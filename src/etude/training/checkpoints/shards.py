"""Sharded tensors (DTensors) of a checkpoint.

`shard_files` writes and reads them. It is imported only where there are shards: the parts of PyTorch that it
needs take a second to import, which a process without other ranks need not spend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import EtudeError, RankError, StoreError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

SHARDS = "shards"
"""Name of the directory of shard files in a checkpoint."""
_SEPARATOR = "::"
"""Separates the keys in a shard's path. Names of parameters contain dots, those of adapters slashes."""

T = TypeVar("T")
Shards = Mapping[str, Tensor]
"""DTensors by key."""


@dataclass(frozen=True, slots=True)
class ModelShards:
    """This rank's shards of a model, and the group of ranks that writes and reads them together."""

    config: ModelConfig | None
    """None: only the state is stored, no model."""
    vocab_size: int
    weights: Shards
    """By the parameters' names."""
    group: dist.ProcessGroup
    """All ranks. Used for checkpoints alone, by one thread at a time."""

    def state_dict(self) -> Shards:
        """The weights by name."""
        return self.weights


def without_model(stored: object) -> ModelShards | None:
    """A stand-in for `stored` in a checkpoint without a model: on several ranks, ModelShards that hold only
    the group; None in one process."""
    return replace(stored, config=None, weights={}) if isinstance(stored, ModelShards) else None


def is_shard(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor, without importing their module: if it is not imported, there are none."""
    # Another thread may be importing them just now: then there are none yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def split_shards(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Splits nested mappings into their DTensors, by path, and the other values, in the same nesting."""
    shards: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, value in tree.items():
        assert _SEPARATOR not in str(name), name
        if is_shard(value):
            shards[name] = value
        elif isinstance(value, Mapping):
            found, rest[name] = split_shards(value)
            shards |= {f"{name}{_SEPARATOR}{path}": tensor for path, tensor in found.items()}
        else:
            rest[name] = value
    return shards, rest


def join_shards(rest: Mapping[str, Any], shards: Shards) -> dict[str, Any]:
    """The inverse of `split_shards`."""
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


def run_on_all_ranks(group: dist.ProcessGroup, act: Callable[[], T]) -> list[T]:
    """Calls `act` and returns its results on all ranks. If it fails on any, all raise the error of the first
    of these. Collective.

    Raises RankError if a rank is lost, StoreError for an exception that is no EtudeError.
    """
    outcome: tuple[T | None, EtudeError | None]
    try:
        outcome = act(), None
    except EtudeError as error:
        outcome = None, error
    except Exception as error:  # other ranks may be unable to unpickle it, so only its text is sent
        outcome = None, StoreError(f"failed on rank {group.rank()}: {error!r}", field="checkpoint")
    outcomes = gather_objects(outcome, group)
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks of a group, on each of them. Collective. Raises RankError if one is lost."""
    gathered: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(gathered, value, group=group)
    except (RuntimeError, ConnectionError) as error:
        raise lost_rank(error) from error
    return gathered


def has_shards(directory: Path) -> bool:
    """Whether several ranks wrote this checkpoint."""
    return (directory / SHARDS).is_dir()


def num_writers(directory: Path) -> int:
    """How many ranks wrote shards of a checkpoint; 0 for an unsharded one."""
    return len({file.name.split("-")[1] for file in (directory / SHARDS).glob("shard-*")})


def lost_rank(cause: object) -> RankError:
    """The error for a collective call that failed, and why."""
    return RankError(
        f"a rank has ended or is too late: {cause}",
        field="parallel",
        fix="see its messages above, then continue from the last checkpoint with --resume",
    )
