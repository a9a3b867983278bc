"""Tensors of which every rank has its part: DTensors, which know where they lie in the whole.

`shard_files` writes and reads them. It is imported where there are any: what it needs of PyTorch takes a
second to import, which a process without other ranks need not spend.
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
"""The directory of these files in a checkpoint."""
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


def is_shard(value: object) -> TypeIs[DTensor]:
    """Whether this is a DTensor. Where nobody has imported them, nothing is."""
    # Another thread may be importing them just now: then there are none yet.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def split_shards(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Nested mappings -> their DTensors, by path, and all the rest, nested as it was."""
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
        raise lost_rank(error) from error
    for _, error in outcomes:
        if error is not None:
            raise error
    return [value for value, _ in outcomes]


def has_shards(directory: Path) -> bool:
    """Whether several ranks have written this checkpoint."""
    return (directory / SHARDS).is_dir()


def num_writers(directory: Path) -> int:
    """How many ranks have written shards of a checkpoint; 0 for one that is whole."""
    return len({file.name.split("-")[1] for file in (directory / SHARDS).glob("shard-*")})


def lost_rank(error: Exception) -> RankError:
    """What to say of a collective call that has failed."""
    return RankError(
        f"a rank is gone or too late: {error}",
        field="checkpoint",
        fix="go on from the last checkpoint with --resume",
    )
