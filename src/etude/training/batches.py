"""Training sequences, and their distribution over the optimiser updates of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etude.algorithms.normalizers import NORMALIZERS
from etude.config import LossConfig

UNKNOWN_LAG = -1
"""Version lag of a token sampled by another lineage, or by weights that were lost when the run was killed."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """One segment with the advantages of its tokens."""

    tokens: NDArray[np.int32]
    """[T]"""
    sampled: NDArray[np.bool_]
    """[T] True where the loss applies."""
    logprobs: NDArray[np.float32]
    """[T] as sampled."""
    advantages: NDArray[np.float32]
    """[T]"""
    routes: NDArray[Any] | None = None
    """[T, layers, top_k] uint8, or uint16 where there are more than 255 experts; None where the router
    chooses."""
    lags: NDArray[np.int32] | None = None
    """[T] trainer steps since the version that sampled a token, or UNKNOWN_LAG; None: 0 everywhere."""
    segment_id: str = ""
    weight: float = 0.0
    """Factor on each trained token's loss: the update's normaliser."""
    place: int = 0
    """Index of the first trained token among all trained tokens of the step."""
    proximal: NDArray[np.float32] | None = None
    """[T] the trainer's own log-probabilities at the step's start; None where the loss does not use them."""

    @property
    def num_trained(self) -> int:
        """Tokens with a loss."""
        return int(self.sampled.sum())

    @property
    def has_advantage(self) -> bool:
        """Whether any trained token has an advantage other than 0."""
        return bool(self.advantages[self.sampled].any())

    @property
    def places(self) -> NDArray[np.int64]:
        """[T] index of each trained token among all of the step's; undefined at other tokens."""
        return self.place + self.sampled.cumsum() - 1


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGroup:
    """The graded members of one group."""

    chains: tuple[tuple[TrainingSequence, ...], ...]
    """Per trajectory its segments; empty for a trajectory none of whose segments can be trained on."""


def split_updates(groups: Sequence[TrainingGroup], loss: LossConfig, num_updates: int) -> list[Update]:
    """Deals whole groups over the updates of one step, in turn; empty updates are left out."""
    dealt = [[group for group in groups[i::num_updates] if group.chains] for i in range(num_updates)]
    updates: list[Update] = []
    place = 0
    for part in dealt:
        if part:
            updates.append(_update(part, loss, place))
            place += sum(sequence.num_trained for sequence in updates[-1])
    return updates


Update = list[TrainingSequence]
"""The weighted sequences of one optimiser update."""


def _update(groups: Sequence[TrainingGroup], loss: LossConfig, place: int) -> Update:
    lengths = [[sum(s.num_trained for s in chain) for chain in group.chains] for group in groups]
    weights = NORMALIZERS[loss.normalizer](lengths, loss.constant_tokens)
    update: Update = []
    for group, by_chain in zip(groups, weights, strict=True):
        for chain, weight in zip(group.chains, by_chain, strict=True):
            for sequence in chain:
                update.append(replace(sequence, weight=weight, place=place))
                place += sequence.num_trained
    return update


def describe_batch(sequences: Iterable[TrainingSequence]) -> dict[str, Any]:
    """The content of a batch as tensors and plain values, for a file that helps to diagnose an error."""
    return {
        "sequences": [
            {
                "segment_id": sequence.segment_id,
                "tokens": torch.from_numpy(sequence.tokens),
                "sampled": torch.from_numpy(sequence.sampled),
                "logprobs": torch.from_numpy(sequence.logprobs),
                "advantages": torch.from_numpy(sequence.advantages),
                "weight": sequence.weight,
            }
            for sequence in sequences
        ]
    }
