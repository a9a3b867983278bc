"""The interface of the inner loops of delta coding, over words and symbols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.weights.delta.classes import Words
from etude.weights.delta.symbols import Counts, Values
from etude.weights.delta.words import WordLayout

Positions = NDArray[np.uint32]
Starts = NDArray[np.int64]
"""[groups + 1]: offsets of the groups in an array, and the end."""
Tables = NDArray[np.uint16]
"""[groups, NUM_SYMBOLS]: frequencies of each group's symbols."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The words that differ between two arrays."""

    positions: Positions
    """Ascending."""
    differences: Values
    """0 for one step up, 1 for one down, 2 for two up: steps of the bit patterns, which for numbers of one
    sign are steps from one representable number to the next."""
    counts: Counts
    """[256, NUM_SYMBOLS]: by the old word's exponent and the difference's symbol."""

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Coded:
    """A sequence of values in interleaved rANS."""

    states: NDArray[np.uint32]
    """[lanes], a power of two: each lane's last state."""
    words: NDArray[np.uint16]
    bits: NDArray[np.uint8]
    """Raw bits that follow the symbols, packed from the lowest on."""


class DeltaKernels(Protocol):
    """Two implementations give the same results, bit for bit: `NativeKernels` and `VectorisedKernels`."""

    def scan(self, base: Words, target: Words, layout: WordLayout) -> Changes:
        """Finds where and by how much two arrays differ."""
        ...

    def gather(
        self, base: Words, changes: Changes, layout: WordLayout, thresholds: list[int], starts: Starts
    ) -> Values:
        """[2 * changes]. First, class by class, how many unchanged members of the class precede each change;
        then the differences, in the same order.

        `thresholds`: the exponent at which each class begins. `starts`: of each class among the changes.
        """
        ...

    def place(
        self,
        base: Words,
        target: Words,
        layout: WordLayout,
        thresholds: list[int],
        starts: Starts,
        values: Values,
    ) -> None:
        """The reverse of `gather`: writes `target`, which may be `base`. Raises ValueError if a change lies
        beyond the end."""
        ...

    def count(self, values: Values, starts: Starts) -> Counts:
        """[groups, NUM_SYMBOLS]: symbols of each group."""
        ...

    def encode(self, values: Values, starts: Starts, tables: Tables, lanes: int) -> Coded:
        """Codes all groups in one sequence; value i belongs to lane i % lanes."""
        ...

    def decode(self, coded: Coded, starts: Starts, tables: Tables) -> Values:
        """The reverse of `encode`. Raises ValueError for what `encode` cannot have written."""
        ...
