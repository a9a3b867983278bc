"""A trainer's interface to the other processes that train the same model.

A trainer is written once, for one process. It asks its `Ranks` for its share of a batch, trains on it as if
there were no others, and the optimiser sums the gradients:

    plan = pack_sequences(lengths, max_tokens, num_ranks=ranks.world_size)    every rank plans the same
    for share in ranks.share(plan): loss(share.indices) * share.weight -> backward
    optimizer.step()                                                          sums gradients, clips, updates

Losses are divided by the count of the *whole* batch, which every rank knows because every rank plans all of
it: gradients are then summed over ranks, never averaged. `SingleRank` implements it for one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from etude.training.checkpoints.shards import ModelShards
from etude.training.parallel.layout import Layout

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Share:
    """One micro-batch of one rank."""

    indices: tuple[int, ...]
    """Indices of its sequences in the batch."""
    weight: float = 1.0
    """Factor on its loss: 1, or 0 if the rank has no sequences left and only takes part in the collective
    operations of the others' forward passes. Such a share must not be counted in metrics."""


class Ranks(Protocol):
    """The processes that train one model. All of them call the same methods in the same order.

    Ranks that train on the same sequences (context and tensor parallelism) count as one here.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks that train on different data."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and reports."""
        ...

    def share(self, plan: Sequence[Sequence[Sequence[int]]]) -> list[Share]:
        """This rank's micro-batches of `plan` (indices by rank and micro-batch): as many on every rank."""
        ...

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replaces `tensor` by its sum over ranks, added in the order of ranks; returns it."""
        ...

    def layout(self, model: nn.Module) -> Layout:
        """The sharding of the parameters, for the optimiser."""
        ...

    def reduce_gradients(self, model: nn.Module) -> None:
        """Sums the gradients over all ranks, in the order of ranks, in place. `Optimizer.step` calls it."""
        ...

    def whole_model(self, model: ModelT) -> ModelT:
        """The unsharded model, in the first rank's process, for export.

        In one process it is the model itself; otherwise a copy, which has no storage on other ranks.
        """
        ...

    def parts(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The parts of the model that this process publishes, by `Part.stored_name`: each is published by one
        process. They share memory with the model where they are runs of its rows."""
        ...

    def stored(self, model: ModelT) -> ModelT | ModelShards:
        """The model in the form in which checkpoints are written and read: ModelShards, or in one process the
        model itself."""
        ...

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Copies weights, by name, into this process' parts: unsharded ones, or those of `stored`."""
        ...

    def frozen_copy(self, model: ModelT) -> ModelT:
        """A copy that is sharded like the model and requires no gradients."""
        ...


class SingleRank:
    """Training by one process, without sharding. Implements Ranks."""

    world_size = 1
    is_main = True

    def share(self, plan: Sequence[Sequence[Sequence[int]]]) -> list[Share]:
        return shares_of(plan, 0)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return tensor

    def layout(self, model: nn.Module) -> Layout:
        return Layout(model)

    def reduce_gradients(self, model: nn.Module) -> None:
        """See Ranks."""

    def whole_model(self, model: ModelT) -> ModelT:
        return model

    def parts(self, model: nn.Module) -> Mapping[str, Tensor]:
        return dict(model.named_parameters())

    def stored(self, model: ModelT) -> ModelT | ModelShards:
        return model

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        model.load_state_dict(weights)

    def frozen_copy(self, model: ModelT) -> ModelT:
        return copy.deepcopy(model).requires_grad_(requires_grad=False)


def shares_of(plan: Sequence[Sequence[Sequence[int]]], rank: int) -> list[Share]:
    """The micro-batches of `rank`, padded to the greatest number that any rank has.

    In place of missing or empty ones, it gets the plan's smallest micro-batch with weight 0.
    """
    filled = [batch for batches in plan for batch in batches if batch]
    if not filled:
        return []
    filler = Share(tuple(min(filled, key=len)), 0.0)
    longest = max(len(batches) for batches in plan)
    own = [Share(tuple(indices)) if indices else filler for indices in plan[rank]]
    return own + [filler] * (longest - len(own))
