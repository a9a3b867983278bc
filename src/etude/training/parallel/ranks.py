"""What a trainer knows of the other processes that train the same model with it.

A trainer is written once, for one process. It asks its `Ranks` for its share of a batch, trains on it as if
there were no others, and lets the optimiser add up the gradients:

    plan = pack_sequences(lengths, max_tokens, num_ranks=ranks.world_size)    every rank plans the same
    for share in ranks.share(plan): loss(share.indices) * share.weight -> backward
    optimizer.step()                                                          sums gradients, clips, updates

Losses are divided by what the *whole* batch counts, which every rank knows because every rank plans the whole
batch: gradients are then summed over ranks, never averaged. `SingleRank` is the whole of it in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from etude.training.checkpoints.shards import ModelShards
from etude.training.parallel.layout import Layout, WholeLayout

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Share:
    """One micro-batch of one rank."""

    indices: tuple[int, ...]
    """Which sequences of the batch it holds."""
    weight: float = 1.0
    """What its loss is multiplied by: 1, or 0 where the rank has nothing left to train on and only keeps
    step with the others, whose forward passes need it. Such a share belongs in no metric."""


class Ranks(Protocol):
    """The processes that train one model. All of them call the same methods in the same order.

    Ranks that train on the same sequences (context and tensor parallelism) count as one here.
    """

    @property
    def rank(self) -> int:
        """Place among those that train on different data."""
        ...

    @property
    def world_size(self) -> int:
        """How many train on different data."""
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
        """Which part of each parameter lies here: what the optimiser works with."""
        ...

    def reduce_gradients(self, model: nn.Module) -> None:
        """Adds up the gradients of all ranks, in the order of ranks, in place. `Optimizer.step` calls it."""
        ...

    def whole_model(self, model: ModelT) -> ModelT:
        """The model with all of its weights, in the first rank's process: what is exported.

        In one process it is the model itself; otherwise a copy, which has no storage on other ranks.
        """
        ...

    def parts(self, model: nn.Module) -> Mapping[str, Tensor]:
        """What this process publishes of the model, by `Part.stored_name`: each weight, or part of one, is
        among those of one process. They share memory with the model where they are runs of its rows."""
        ...

    def stored(self, model: ModelT) -> ModelT | ModelShards:
        """What a checkpoint takes of the model, and what says how one is to be read: in one process the model
        itself."""
        ...

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Puts weights, by name, into the parts that lie here: whole ones, or such as `stored` gives."""
        ...

    def frozen_copy(self, model: ModelT) -> ModelT:
        """A copy that is spread over the ranks as the model is and does not learn."""
        ...


class SingleRank:
    """One process that has everything. Implements Ranks."""

    rank = 0
    world_size = 1
    is_main = True

    def share(self, plan: Sequence[Sequence[Sequence[int]]]) -> list[Share]:
        return shares_of(plan, 0)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return tensor

    def layout(self, model: nn.Module) -> Layout:
        return WholeLayout(model)

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
    """The micro-batches of `rank`, as many as any rank has.

    Where it has fewer, or an empty one, it takes the plan's smallest with weight 0.
    """
    filled = [batch for batches in plan for batch in batches if batch]
    if not filled:
        return []
    filler = Share(tuple(min(filled, key=len)), 0.0)
    longest = max(len(batches) for batches in plan)
    own = [Share(tuple(indices)) if indices else filler for indices in plan[rank]]
    return own + [filler] * (longest - len(own))
