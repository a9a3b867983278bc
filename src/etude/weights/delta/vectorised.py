"""The delta kernels in numpy, for machines without a C compiler: tens of times slower, bit-identical."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from etude.weights.delta.classes import Words
from etude.weights.delta.kernels import Changes, Coded, Starts, Tables
from etude.weights.delta.symbols import NUM_SYMBOLS, Counts, Values, least_of, symbols_of, widths_of
from etude.weights.delta.tables import SCALE, SCALE_BITS
from etude.weights.delta.words import WordLayout

_STATE_LOW = 1 << 16


class VectorisedKernels:
    """See DeltaKernels."""

    def scan(self, base: Words, target: Words, layout: WordLayout) -> Changes:
        positions = np.flatnonzero(base != target)
        before = base[positions]
        differences = _difference(before, target[positions])
        exponents = (before.astype(np.int64) & layout.key_mask) >> layout.key_shift
        counts = np.bincount(
            exponents * NUM_SYMBOLS + symbols_of(differences), minlength=256 * NUM_SYMBOLS
        ).reshape(256, NUM_SYMBOLS)
        return Changes(positions.astype(np.uint32), differences, counts)

    def gather(
        self, base: Words, changes: Changes, layout: WordLayout, thresholds: list[int], starts: Starts
    ) -> Values:
        values = np.empty(2 * len(changes), np.uint32)
        gaps, differences = values[: len(changes)], values[len(changes) :]
        changed = np.zeros(len(base), np.bool_)
        changed[changes.positions] = True
        steps = np.zeros(len(base), np.uint32)
        steps[changes.positions] = changes.differences
        for members, first, last in _classes(base, layout, thresholds, starts):
            ranks = np.flatnonzero(changed[members])
            gaps[first:last] = np.diff(ranks, prepend=-1) - 1
            differences[first:last] = steps[members[ranks]]
        return values

    def place(
        self,
        base: Words,
        target: Words,
        layout: WordLayout,
        thresholds: list[int],
        starts: Starts,
        values: Values,
    ) -> None:
        gaps, differences = values[: len(values) // 2], values[len(values) // 2 :]
        changes: list[tuple[NDArray[np.int64], Words]] = []
        for members, first, last in _classes(base, layout, thresholds, starts):
            ranks = np.cumsum(gaps[first:last].astype(np.int64) + 1) - 1
            if len(ranks) and ranks[-1] >= len(members):
                raise ValueError("changes beyond the end")
            own = members[ranks]
            changes.append((own, _stepped(base[own], differences[first:last])))
        if target is not base:
            target[:] = base
        for own, words in changes:
            target[own] = words

    def count(self, values: Values, starts: Starts) -> Counts:
        groups = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        keys = groups * NUM_SYMBOLS + symbols_of(values)
        counts = np.bincount(keys, minlength=(len(starts) - 1) * NUM_SYMBOLS)
        return counts.reshape(-1, NUM_SYMBOLS)

    def encode(self, values: Values, starts: Starts, tables: Tables, lanes: int) -> Coded:
        """See DeltaKernels.encode. Processes a row of lanes at a time, from the last to the first."""
        symbols = symbols_of(values)
        groups = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        frequencies = tables.astype(np.int64)[groups, symbols]
        before = _before(tables)[groups, symbols]
        states = np.full(lanes, _STATE_LOW, np.int64)
        rows: list[NDArray[np.uint16]] = []
        for start in reversed(range(0, len(values), lanes)):
            frequency, first = frequencies[start : start + lanes], before[start : start + lanes]
            row = states[: len(frequency)]
            full = row >= frequency << (32 - SCALE_BITS)
            rows.append(row[full].astype(np.uint16))
            row[full] >>= 16
            row[:] = (row // frequency << SCALE_BITS) + row % frequency + first
        words = np.concatenate([np.empty(0, np.uint16), *reversed(rows)])
        return Coded(states.astype(np.uint32), words, _pack(values.astype(np.int64), widths_of(symbols)))

    def decode(self, coded: Coded, starts: Starts, tables: Tables) -> Values:
        """See DeltaKernels.decode. Processes a row of lanes at a time."""
        total, lanes = int(starts[-1]), len(coded.states)
        groups = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        if (tables.sum(axis=1, dtype=np.int64) != SCALE).any():
            raise ValueError("frequencies do not sum up")
        slots = np.stack([np.repeat(np.arange(NUM_SYMBOLS), table) for table in tables])
        frequencies, before = tables.astype(np.int64), _before(tables)
        states, words, at = coded.states.astype(np.int64), coded.words.astype(np.int64), 0
        symbols = np.empty(total, np.int64)
        for start in range(0, total, lanes):
            group = groups[start : start + lanes]
            row = states[: len(group)]
            slot = row & (SCALE - 1)
            symbol = slots[group, slot]
            symbols[start : start + lanes] = symbol
            row[:] = frequencies[group, symbol] * (row >> SCALE_BITS) + slot - before[group, symbol]
            empty = np.flatnonzero(row < _STATE_LOW)
            if at + len(empty) > len(words):
                raise ValueError("the end of the coded values is missing")
            row[empty] = row[empty] << 16 | words[at : at + len(empty)]
            at += len(empty)
        if at != len(words) or (states != _STATE_LOW).any():
            raise ValueError("the coded values are damaged")
        return (least_of(symbols) + _unpack(coded.bits, widths_of(symbols))).astype(np.uint32)


def _classes(
    base: Words, layout: WordLayout, thresholds: list[int], starts: Starts
) -> list[tuple[NDArray[np.int64], int, int]]:
    """For each class that has changes: the positions of its members, and its slice of the changes."""
    keys = (base & layout.key_mask) >> layout.key_shift
    belongs = np.searchsorted(np.array(thresholds), keys, side="right") - 1
    return [
        (np.flatnonzero(belongs == index), int(starts[index]), int(starts[index + 1]))
        for index in range(len(thresholds))
        if starts[index] < starts[index + 1]
    ]


def _difference(before: Words, after: Words) -> Values:
    """0 for one step up, 1 for one down, 2 for two up...; words are unsigned, so a step may wrap around."""
    step = (after - before).view(f"i{before.itemsize}").astype(np.int64)
    return np.where(step > 0, 2 * (step - 1), 2 * (-step - 1) + 1).astype(np.uint32)


def _stepped(before: Words, differences: Values) -> Words:
    size = (differences.astype(np.int64) >> 1) + 1
    return (before + np.where(differences & 1, -size, size)).astype(before.dtype)


def _before(tables: Tables) -> Counts:
    """Cumulative frequency before each symbol."""
    return np.cumsum(tables, axis=1, dtype=np.int64) - tables


def _pack(values: NDArray[np.int64], widths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Packs the lowest bits of each value, one after another."""
    ends = np.cumsum(widths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - widths, widths)
    return np.packbits((np.repeat(values, widths) >> within & 1).astype(np.uint8), bitorder="little")


def _unpack(data: NDArray[np.uint8], widths: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = np.cumsum(widths)
    total = int(ends[-1]) if len(ends) else 0
    if (total + 7) // 8 != len(data):
        raise ValueError("plain bits are missing or too many")
    bits = np.unpackbits(data, bitorder="little", count=total).astype(np.int64)
    within = np.arange(total) - np.repeat(ends - widths, widths)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(bits << within)])
    return sums[ends] - sums[ends - widths]
