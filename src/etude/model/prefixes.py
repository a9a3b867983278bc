"""Prefix sharing: common prefixes of the sequences of a packed batch are computed once.

    sequences   system, task A, turn 1, ...        rows computed   system, task A, turn 1, ..., turn 1', ...,
                system, task A, turn 1', ...                       task B, turn 1, ...
                system, task B, turn 1, ...

A row of a causal model depends only on the tokens up to it, so rows with equal prefixes have equal values,
and the gradient of a shared row is the sum over its sequences. Sessions of an agent begin with the same
instructions and tools, and those of a group with the same task: everything is computed for the rows of this
prefix tree only, except that attention holds their keys and values once for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.model.rows import PackedRows
from etude.protocols import Attention

LEAST_SAVED = 0.1
"""Minimum share of rows saved by sharing: gathering keys and values for attention has a cost, too."""


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention over all rows of a packed batch, for a caller that has each shared row once."""

    packed: Attention[Tensor]
    """Attention over all T rows."""
    source: Tensor
    """[T] int64: index of each packed row among the M rows of the caller."""
    first: Tensor
    """[M] int64: index of the first packed row that equals each of the caller's rows."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [M, heads, dim], key and value [M, kv_heads, dim] -> [M, heads, value_dim]."""
        query, key, value = (rows.index_select(0, self.source) for rows in (query, key, value))
        return self.packed.attend(layer, query, key, value).index_select(0, self.first)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Which of T packed rows have equal prefixes."""

    source: NDArray[np.int64]
    """[T] index of each row among the M distinct ones."""
    first: NDArray[np.int64]
    """[M] index of the first packed row of each distinct one."""
    repeated: NDArray[np.int64]
    """[sequences] number of rows at the start of each that first occur in another sequence."""


def share_prefixes(rows: PackedRows, shared: SharedRows) -> PackedRows:
    """The same predictions from fewer rows.

    Not for models that route: shared rows may have been routed otherwise in each sequence.
    """
    device = rows.tokens.device
    to_source, to_first = (torch.from_numpy(found).to(device) for found in (shared.source, shared.first))
    return replace(
        rows,
        tokens=rows.tokens[to_first],
        positions=rows.positions[to_first],
        attention=SharedAttention(rows.attention, to_source, to_first),
        wanted=to_source[rows.wanted],
    )


def find_shared_rows(sequences: Sequence[NDArray[np.int32]]) -> SharedRows | None:
    """Finds shared rows; None if hardly any are. `sequences`: the tokens of the rows, in packed order. They
    are sorted by their tokens, so that each shares most with its neighbours."""
    starts = np.cumsum([0, *map(len, sequences)])
    source = np.empty(starts[-1], np.int64)
    first: list[NDArray[np.int64]] = []
    repeated = np.zeros(len(sequences), np.int64)
    count, before, places = 0, sequences[0][:0], source[:0]
    for index in sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes()):
        tokens, own = sequences[index], source[starts[index] : starts[index + 1]]
        repeated[index] = shared = _count_equal(before, tokens)
        own[:shared] = places[:shared]
        own[shared:] = np.arange(count, count + len(tokens) - shared)
        first.append(np.arange(starts[index] + shared, starts[index + 1]))
        count += len(tokens) - shared
        before, places = tokens, own
    if count > (1.0 - LEAST_SAVED) * len(source):
        return None
    return SharedRows(source, np.concatenate(first), repeated)


def count_shared_tokens(sequences: Sequence[NDArray[np.int32]]) -> int:
    """Length of all sequences' common prefix, without the last token of any; 0 if it saves too little."""
    if len(sequences) < 2:
        return 0
    shared = min(_count_equal(sequences[0], tokens) for tokens in sequences)
    shared = min(shared, min(map(len, sequences)) - 1)
    saved = shared * (len(sequences) - 1)
    return shared if saved >= LEAST_SAVED * sum(map(len, sequences)) else 0


def _count_equal(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    unequal = np.flatnonzero(one[:length] != other[:length])
    return int(unequal[0]) if len(unequal) else length
