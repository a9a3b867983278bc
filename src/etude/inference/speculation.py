"""Drafts for speculative decoding: the `Drafter` protocol, and n-gram lookup in the session's own tokens.

Agents repeat what they have read: paths, code, arguments. The tokens that followed the last occurrence of
the current n-gram are a cheap guess of what comes next (prompt lookup decoding, Saxena 2023). Where a model
has layers for it, `mtp` drafts with those. The engine verifies drafts in one pass, by sampling at every
position what it would have sampled without them: see `stepping`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Drafter(Protocol):
    """Proposes the tokens that a session will probably sample next."""

    def draft(self, row: int, tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """Up to `most` tokens that may follow `tokens` [n], all those of the session in `row`."""
        ...


@dataclass(frozen=True, slots=True)
class NgramLookup:
    """Drafts what followed the last occurrence of the current n-gram. Implements `Drafter`."""

    num_drafts: int = 4
    """Most tokens drafted at once."""
    longest: int = 3
    """Longest n-gram, tried first."""
    shortest: int = 2
    """Shortest n-gram."""
    adaptive: bool = True
    """Whether sessions where drafts do not pay continue without them."""

    def __post_init__(self) -> None:
        if self.num_drafts < 1 or not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"NgramLookup: needs num_drafts >= 1 and 1 <= shortest <= longest, received {self}"
            )

    def draft(self, row: int, tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """See Drafter: none if the last n-gram of `tokens` is new."""
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
    """The model's last hidden states of each session, which draft layers after the first read again once the
    tokens after them are known."""

    depth: int
    """Layers that run over every position."""
    hidden: Tensor
    """[rows, depth - 1, width]"""
    counts: NDArray[np.int64]
    """[rows] number of valid states."""
    ends: NDArray[np.int64]
    """[rows] slot after the last of them."""
