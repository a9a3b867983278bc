"""Attention over a packed batch: concatenated sequences that do not attend to each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from etude.model import flash
from etude.model.kernels.native import training
from etude.model.permute import pad, unpad


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences of similar length, padded to the longest of them."""

    num_sequences: int
    length: int
    source: Tensor
    """[num_sequences * length] row at each position of the padded bucket; the row count for padding."""
    place: Tensor
    """[rows] position of each row in the padded bucket."""
    num_rows: int


class PackedAttention:
    """Causal attention within each sequence of a packed batch.

    float32 on a CPU uses native kernels (see `flash`). Otherwise sequences are grouped into a few buckets of
    similar length, each padded to its own longest, so that little computation is wasted: their lengths must
    be in falling order.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        waste: float = 0.15,
        device: torch.device | str | None = None,
        unused: NDArray[np.int64] | None = None,
    ) -> None:
        """`lengths`: tokens of each sequence, falling. `waste`: padding share at which a bucket is closed.
        `device`: device of the rows, by default the CPU. `unused` [sequences]: number of rows at the start of
        each whose results the caller does not use."""
        assert all(a >= b for a, b in itertools.pairwise(lengths)), "lengths must fall"
        self.lengths = tuple(lengths)
        """Tokens of each sequence."""
        self._waste, self._device = waste, device
        self._starts = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        self.unused = unused
        """As given: the results of these rows are undefined."""

    @cached_property
    def _buckets(self) -> list[_Bucket]:
        return [_make_bucket(bucket, self._device) for bucket in _split(self.lengths, self._waste)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, dim], key [T, kv_heads, dim], value [T, kv_heads, value_dim] -> [T, heads,
        value_dim], where value_dim <= dim."""
        if training.computes(query, key, value):
            return flash.attend(query, key, value, self._starts, self.unused)
        return self.attend_padded(query, key, value)

    def attend_padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same by PyTorch's kernel, bucket by bucket, for any type and device."""
        value_dim = value.shape[-1]
        if value_dim < key.shape[-1]:
            # The fused CPU kernel needs equal widths; padding with zeros costs less than another kernel.
            value = F.pad(value, (0, key.shape[-1] - value_dim))
            return self.attend_padded(query, key, value)[..., :value_dim]
        if len(self._buckets) == 1:
            return _attend_bucket(self._buckets[0], query, key, value)
        sizes = [bucket.num_rows for bucket in self._buckets]
        parts = zip(self._buckets, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        return torch.cat([_attend_bucket(bucket, q, k, v) for bucket, q, k, v in parts])


def _attend_bucket(bucket: _Bucket, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    rows = torch.cat((query, key, value), dim=1)
    padded = pad(rows, bucket.source, bucket.place)
    padded = padded.view(bucket.num_sequences, bucket.length, -1, dim).transpose(1, 2)
    q, k, v = padded.split((heads, kv_heads, kv_heads), dim=1)
    if heads != kv_heads:
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    flat = out.transpose(1, 2).reshape(-1, heads, dim)
    return unpad(flat, bucket.source, bucket.place)


def _split(lengths: Sequence[int], waste: float) -> list[list[int]]:
    """Splits falling lengths into runs whose share of padding stays below `waste`."""
    buckets: list[list[int]] = []
    for length in lengths:
        bucket = buckets[-1] if buckets else []
        padded = bucket[0] * (len(bucket) + 1) if bucket else 0
        if not bucket or 1 - (sum(bucket) + length) / padded > waste:
            buckets.append([length])
        else:
            bucket.append(length)
    return buckets


def _make_bucket(lengths: Sequence[int], device: torch.device | str | None) -> _Bucket:
    """Computes the indices on the CPU: on a GPU, counting the rows would synchronise with the device."""
    longest, num_rows = lengths[0], sum(lengths)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    column = torch.arange(longest)
    inside = column[None] < torch.tensor(lengths)[:, None]
    source = torch.where(inside, starts[:, None] + column[None], num_rows).flatten()
    place = inside.flatten().nonzero().flatten()
    return _Bucket(len(lengths), longest, source.to(device), place.to(device), num_rows)
