"""Classes of words that change about equally often: ranges of exponents."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from etude.weights.delta.symbols import Counts
from etude.weights.delta.words import WordLayout

MAX_CLASSES = 16
"""Most classes in the format."""
_CHOSEN_CLASSES = 8
"""Most classes that the encoder uses. Twice as many make updates 1 % smaller, but slower to code."""
_OVERHEAD_BITS = 96.0
"""Approximate cost of the tables of one more class."""
_SAMPLED = 1 << 16
"""Words sampled to estimate populations."""
_RUN = 64
"""Consecutive words per sample."""

Words = NDArray[np.unsignedinteger]


def choose_classes(words: Words, layout: WordLayout, changes: Counts) -> list[int]:
    """The exponents at which classes begin, the first at 0.

    `changes` [256, symbols]: number of changed words by exponent and symbol of the difference. Greedy: starts
    with one class per exponent and joins neighbours while that saves bits.
    """
    sampled = _sample(words)
    counted = np.bincount((sampled & layout.key_mask) >> layout.key_shift, minlength=256).astype(np.float64)
    changed = changes.sum(axis=1)
    populations = np.maximum(counted * (len(words) / len(sampled)), changed)
    present = np.flatnonzero(populations)
    sums, symbols = populations[present], changes[present][:, changes.any(axis=0)].astype(np.float64)
    starts = [0, *present[1:].tolist()]
    costs = _cost(sums, symbols)
    joined = _cost(sums[:-1] + sums[1:], symbols[:-1] + symbols[1:])
    while len(starts) > 1:
        loss = joined - costs[:-1] - costs[1:]
        left = int(np.argmin(loss))
        if loss[left] > 0 and len(starts) <= _CHOSEN_CLASSES:
            break
        right = left + 1
        sums[left] += sums[right]
        symbols[left] += symbols[right]
        costs[left] = joined[left]
        del starts[right]
        sums, symbols, costs = (_without(array, right) for array in (sums, symbols, costs))
        joined = _without(joined, left)
        first, end = max(left - 1, 0), min(left + 1, len(starts) - 1)  # neighbours whose join has changed
        near, after = slice(first, end), slice(first + 1, end + 1)
        joined[near] = _cost(sums[near] + sums[after], symbols[near] + symbols[after])
    return starts


def _without(array: NDArray[np.float64], row: int) -> NDArray[np.float64]:
    """Removes a row in place: np.delete takes ten times as long."""
    array[row:-1] = array[row + 1 :]
    return array[:-1]


def _sample(words: Words) -> Words:
    """Runs of words at even distances."""
    stride = len(words) // _SAMPLED * _RUN
    if stride <= _RUN:
        return words
    whole = len(words) // stride * stride
    return words[:whole].reshape(-1, stride)[:, :_RUN].reshape(-1)


def _cost(populations: NDArray[np.float64], symbols: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimated bits of each class: positions of changes, differences and tables."""
    changed = symbols.sum(axis=1)
    positions = _bits(populations) - _bits(changed) - _bits(populations - changed)
    differences = _bits(changed) - _bits(symbols).sum(axis=1)
    return positions + differences + _OVERHEAD_BITS


def _bits(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """n log2 n."""
    return counts * np.log2(np.maximum(counts, 1.0))
