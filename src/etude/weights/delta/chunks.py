"""The encoding of a chunk, a range of a tensor's words: its changes, or its whole content.

A chunk begins with its kind:
- `SAME`: unchanged, nothing follows.
- `DELTA`: classes (number, the exponent at which each but the first begins), changes of each class, tables of
  the gaps of each class that has changes, tables of its differences, then gaps and differences in rANS.
- `WHOLE`: byte planes (all first bytes of the words, then all second ones, ...), each in zstd. Needs no base.
- `OVERWRITE`: the number of changes, a table of gaps, the gaps in rANS, then the new words as in `WHOLE`.
  It gives the same result when applied to the base or to its own result.
"""

from __future__ import annotations

import itertools

import numpy as np
import zstandard
from numpy.typing import NDArray

from etude.weights.delta.classes import MAX_CLASSES, Words, choose_classes
from etude.weights.delta.kernels import Changes, Coded, DeltaKernels, Positions, Starts, Tables
from etude.weights.delta.symbols import Values
from etude.weights.delta.tables import Table, counted_table, gap_table, read_table
from etude.weights.delta.variable import Reader, pack_number
from etude.weights.delta.words import WordLayout

SAME, DELTA, WHOLE, OVERWRITE = range(4)
CHUNK_WORDS = 1 << 23
"""Words of a chunk, except the last of a tensor: bounds the memory for coding."""
_WORTH_TRYING = 8
"""Weights hardly ever compress by more than this factor: a smaller delta is used without trying `WHOLE`."""
_VALUES_PER_LANE = 1024
_MAX_LANES = 256
_ZSTD_LEVEL = 1


def encode_chunk(
    base: Words | None, target: Words, layout: WordLayout, kernels: DeltaKernels, *, overwrite: bool = False
) -> bytes:
    """The shortest chunk from which `decode_chunk` makes `target`, given `base` of the same length or None.

    `overwrite`: only kinds that may be applied twice.
    """
    if base is None:
        return bytes([WHOLE]) + _pack_planes(target)
    changes = kernels.scan(base, target, layout)
    if not len(changes):
        return bytes([SAME])
    if overwrite:
        chunk = _overwrite(target, changes.positions, kernels)
    else:
        chunk = _delta(base, changes, layout, kernels)
    if len(chunk) * _WORTH_TRYING <= target.nbytes:
        return chunk
    return min(chunk, bytes([WHOLE]) + _pack_planes(target), key=len)


def decode_chunk(
    chunk: memoryview, base: Words | None, target: Words, layout: WordLayout, kernels: DeltaKernels
) -> None:
    """Decodes into `target`. Raises ValueError for malformed chunks, as far as they can be detected."""
    reader = Reader(chunk)
    kind = reader.byte()
    if kind == WHOLE:
        target[:] = _read_planes(reader, len(target), target.itemsize)
    elif base is None:
        raise ValueError("a base is needed")
    elif kind == SAME:
        if target is not base:
            target[:] = base
    elif kind == DELTA:
        _apply_delta(reader, base, target, layout, kernels)
    elif kind == OVERWRITE:
        _apply_overwrite(reader, base, target, kernels)
    else:
        raise ValueError("no such kind of chunk")
    if reader.left:
        raise ValueError("bytes are left over")


def _delta(base: Words, changes: Changes, layout: WordLayout, kernels: DeltaKernels) -> bytes:
    thresholds = choose_classes(base, layout, changes.counts)
    differences = np.add.reduceat(changes.counts, thresholds)
    numbers = differences.sum(axis=1)
    values = kernels.gather(base, changes, layout, thresholds, _starts(numbers))
    groups = _groups(numbers)
    gaps = kernels.count(values[: len(changes)], groups[: len(groups) // 2 + 1])
    tables = [*map(gap_table, gaps), *map(counted_table, differences[numbers > 0])]
    head = bytes([DELTA, len(thresholds), *thresholds[1:]]) + b"".join(map(pack_number, numbers.tolist()))
    return head + _pack_values(values, groups, tables, kernels)


def _apply_delta(
    reader: Reader, base: Words, target: Words, layout: WordLayout, kernels: DeltaKernels
) -> None:
    classes = reader.byte()
    if not 1 <= classes <= MAX_CLASSES:
        raise ValueError("no such number of classes")
    thresholds = [0, *(reader.byte() for _ in range(classes - 1))]
    if any(left >= right for left, right in itertools.pairwise(thresholds)):
        raise ValueError("classes are out of order")
    numbers = _read_numbers(reader, classes, len(base))
    values = _read_values(reader, _groups(numbers), kernels)
    kernels.place(base, target, layout, thresholds, _starts(numbers), values)


def _overwrite(target: Words, positions: Positions, kernels: DeltaKernels) -> bytes:
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    values, starts = gaps.astype(np.uint32), _starts(np.array([len(gaps)]))
    coded = _pack_values(values, starts, [gap_table(kernels.count(values, starts)[0])], kernels)
    return bytes([OVERWRITE]) + pack_number(len(gaps)) + coded + _pack_planes(target[positions])


def _apply_overwrite(reader: Reader, base: Words, target: Words, kernels: DeltaKernels) -> None:
    numbers = _read_numbers(reader, 1, len(base))
    gaps = _read_values(reader, _starts(numbers), kernels)
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(positions) and positions[-1] >= len(base):
        raise ValueError("changes beyond the end")
    words = _read_planes(reader, len(positions), base.itemsize)
    if target is not base:
        target[:] = base
    target[positions] = words


def _pack_planes(words: Words) -> bytes:
    planes = words.view(np.uint8).reshape(-1, words.itemsize).T
    packed = [zstandard.compress(np.ascontiguousarray(plane).data, _ZSTD_LEVEL) for plane in planes]
    return b"".join(pack_number(len(plane)) + plane for plane in packed)


def _read_planes(reader: Reader, count: int, size: int) -> Words:
    planes = np.empty((size, count), np.uint8)
    for plane in planes:
        try:
            data = zstandard.decompress(reader.raw(reader.number()), max_output_size=count)
        except zstandard.ZstdError as error:
            raise ValueError(f"a plane does not unpack: {error}") from error
        if len(data) != count:
            raise ValueError("a plane has another length")
        plane[:] = np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"u{size}")


def _pack_values(values: Values, starts: Starts, tables: list[Table], kernels: DeltaKernels) -> bytes:
    coded = kernels.encode(values, starts, _stack(tables), _num_lanes(len(values)))
    words, bits = coded.words.astype("<u2", copy=False).tobytes(), coded.bits.tobytes()
    parts = (coded.states.astype("<u4", copy=False).tobytes(), pack_number(len(words)), words)
    return b"".join((*(table.pack() for table in tables), *parts, pack_number(len(bits)), bits))


def _read_values(reader: Reader, starts: Starts, kernels: DeltaKernels) -> Values:
    tables = _stack([read_table(reader) for _ in range(len(starts) - 1)])
    states = np.frombuffer(reader.raw(4 * _num_lanes(int(starts[-1]))), "<u4")
    words = np.frombuffer(reader.raw(reader.number()), "<u2")
    bits = np.frombuffer(reader.raw(reader.number()), np.uint8)
    return kernels.decode(Coded(states, words, bits), starts, tables)


def _read_numbers(reader: Reader, classes: int, most: int) -> NDArray[np.int64]:
    numbers = [reader.number() for _ in range(classes)]
    if not 0 < sum(numbers) <= most:
        raise ValueError("no such number of changes")
    return np.array(numbers, np.int64)


def _starts(numbers: NDArray[np.int64]) -> Starts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(numbers, dtype=np.int64)])


def _groups(numbers: NDArray[np.int64]) -> Starts:
    """Group boundaries: the gaps of each class that has changes, then the differences of each."""
    own = numbers[numbers > 0]
    return _starts(np.concatenate([own, own]))


def _stack(tables: list[Table]) -> Tables:
    return np.ascontiguousarray(np.stack([table.frequencies for table in tables]))


def _num_lanes(num_values: int) -> int:
    """The number of lanes, a power of two. Lanes are coded independently, and each costs a few bytes."""
    return min(_MAX_LANES, 1 << max(num_values // _VALUES_PER_LANE, 1).bit_length() - 1)
