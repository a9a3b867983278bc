"""Drafts for speculative decoding: who may propose them, and those looked up in the session's own tokens.

Agents repeat what they have read: paths, code, arguments. The tokens that followed the last occurrence of
the current n-gram are a cheap guess of what comes next (prompt lookup decoding, Saxena 2023). Where a model
has layers for it, `mtp` drafts with those. The engine verifies a draft in one pass, by drawing at every place
what it would have drawn without it: see `stepping`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.sequences import Sequences


class Drafter(Protocol):
    """Guesses what a session will sample next."""

    def draft(self, sequences: Sequences, row: int, most: int) -> NDArray[np.int32]:
        """Up to `most` tokens that may follow what `row` holds."""
        ...


@dataclass(frozen=True, slots=True)
class NgramLookup:
    """How drafts are found."""

    num_drafts: int = 4
    """Most tokens guessed at once."""
    longest: int = 3
    """Tokens of context that must agree, at first."""
    shortest: int = 2
    """Tokens of context that must agree, at least."""
    adaptive: bool = True
    """Whether sessions where drafts do not pay go on without."""

    def __post_init__(self) -> None:
        if self.num_drafts < 1 or not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"NgramLookup: needs num_drafts >= 1 and 1 <= shortest <= longest, received {self}"
            )

    def draft(self, sequences: Sequences, row: int, most: int) -> NDArray[np.int32]:
        """See Drafter."""
        return self.propose(sequences.tokens[row, : int(sequences.length[row])], most)

    def propose(self, tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """Up to `most` tokens that may follow `tokens` [n]; none where nothing like their end came before."""
        most = min(most, self.num_drafts)
        for size in range(self.longest, self.shortest - 1, -1):
            if most < 1 or len(tokens) <= size:
                continue
            ending = tokens[-size:]
            found = tokens[size - 1 : -1] == ending[-1]
            for back in range(1, size):
                found &= tokens[size - 1 - back : -1 - back] == ending[-1 - back]
            places = np.flatnonzero(found)
            if len(places):
                after = int(places[-1]) + size
                return tokens[after : after + most]
        return tokens[:0]


@dataclass(slots=True, eq=False)
class CarriedStates:
    """The model's last hidden states of each session, which further draft layers read again once the tokens
    behind them are known."""

    depth: int
    """Layers that run over every position."""
    hidden: Tensor
    """[rows, depth - 1, width]"""
    counts: NDArray[np.int64]
    """[rows] how many there are."""
    ends: NDArray[np.int64]
    """[rows] slot behind them."""
