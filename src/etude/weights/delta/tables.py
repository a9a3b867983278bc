"""Symbol frequency tables: geometric distributions, given by one byte, or explicit counts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.weights.delta.symbols import LAST_SYMBOL, NUM_SYMBOLS, Counts, least_of
from etude.weights.delta.variable import Reader, pack_number

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
"""Sum of the frequencies of a table."""

Frequencies = NDArray[np.uint16]

_TWICE_THE_MEANS = least_of(np.arange(NUM_SYMBOLS)) + least_of(np.arange(1, NUM_SYMBOLS + 1)) - 1
"""Twice the mean value of each symbol."""

_EXPLICIT = 0
NUM_LEVELS = 112
"""For mean gaps of up to 2^28 words."""
_FIXED_BITS = 60
_QUARTER_OCTAVES = (1 << _FIXED_BITS, 969487560292816559, 815238614083298888, 685531228159052438)
"""2^-(0, 1/4, 1/2, 3/4) in fixed point: integers give the same tables on every machine."""


@dataclass(frozen=True, slots=True)
class Table:
    """Frequencies, and their encoding for the decoder."""

    frequencies: Frequencies
    """[NUM_SYMBOLS]"""
    level: int | None
    """Parameter of a geometric distribution; None if the frequencies are written explicitly."""

    def pack(self) -> bytes:
        """The shortest encoding."""
        last = int(np.flatnonzero(self.frequencies)[-1])
        if self.level is not None:
            return bytes([1 + self.level, last])
        return bytes([_EXPLICIT, last]) + b"".join(map(pack_number, self.frequencies[: last + 1].tolist()))


def read_table(reader: Reader) -> Table:
    """The reverse of `Table.pack`. Raises ValueError for malformed tables."""
    kind, last = reader.byte(), reader.byte()
    if kind > NUM_LEVELS or last > LAST_SYMBOL:
        raise ValueError("no such table")
    if kind != _EXPLICIT:
        return Table(geometric_frequencies(kind - 1, last), kind - 1)
    counts = [reader.number() for _ in range(last + 1)]
    if sum(counts) != SCALE:
        raise ValueError("frequencies do not sum up")
    frequencies = np.zeros(NUM_SYMBOLS, np.uint16)
    frequencies[: last + 1] = counts
    return Table(frequencies, None)


def counted_table(counts: Counts) -> Table:
    """The explicit table for `counts` [NUM_SYMBOLS], not all zero."""
    return Table(_normalise(counts), None)


def gap_table(counts: Counts) -> Table:
    """The cheaper of a geometric and an explicit table for gaps with these `counts`.

    Changes that are independent of each other leave geometric gaps; those of embeddings come in clusters.
    """
    total = int(counts.sum())
    last = int(np.flatnonzero(counts)[-1])
    counted = counted_table(counts)
    mean = float(counts @ _TWICE_THE_MEANS) / 2 / total
    level = min(NUM_LEVELS - 1, max(0, round(4 * float(np.log2(mean + 1)))))
    geometric = Table(geometric_frequencies(level, last), level)
    counted_bits = 8.0 * (last + 1) + code_bits(counts, counted.frequencies)
    return geometric if code_bits(counts, geometric.frequencies) <= counted_bits else counted


def code_bits(counts: Counts, frequencies: Frequencies) -> float:
    """Coded size of these symbol counts under a table, in bits."""
    used = counts > 0
    return float(counts[used] @ (SCALE_BITS - np.log2(frequencies[used].astype(np.float64))))


@functools.lru_cache(maxsize=4096)
def geometric_frequencies(level: int, last: int) -> Frequencies:
    """Frequencies of the gaps before changes of probability 2^(-level/4), up to the symbol `last`."""
    probability = _QUARTER_OCTAVES[level % 4] >> (level // 4)
    stay = (1 << _FIXED_BITS) - probability
    bounds = least_of(np.arange(last + 2)).tolist()
    survival = [_power(stay, bound) for bound in bounds]
    weights = [(before - after) >> (_FIXED_BITS - 40) for before, after in itertools.pairwise(survival)]
    counts = np.zeros(NUM_SYMBOLS, np.int64)
    counts[: last + 1] = np.maximum(weights, 1)
    frequencies = _normalise(counts)
    frequencies.setflags(write=False)
    return frequencies


def _power(base: int, exponent: int) -> int:
    """Power in fixed point, rounded down at each step."""
    result = 1 << _FIXED_BITS
    while exponent:
        if exponent & 1:
            result = result * base >> _FIXED_BITS
        base = base * base >> _FIXED_BITS
        exponent >>= 1
    return result


def _normalise(counts: Counts) -> Frequencies:
    """Scales counts to frequencies that sum to SCALE, nonzero where the count is. Integer arithmetic only."""
    total = int(counts.sum())
    scaled = np.where(counts > 0, np.maximum(counts * SCALE // total, 1), 0)
    while (excess := int(scaled.sum()) - SCALE) != 0:
        largest = int(np.argmax(scaled))
        # Take at most half from one symbol: with many rare symbols, several must be reduced.
        scaled[largest] -= min(excess, int(scaled[largest]) // 2) if excess > 0 else excess
    return scaled.astype(np.uint16)
