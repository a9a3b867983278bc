"""Attention over pages with PyTorch's operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import PAGE_TOKENS, PagedCache, StepRows


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Sequences that compute one position each, of like length."""

    rows: Tensor
    """[R] rows of the step."""
    tables: Tensor
    """[R, pages]"""
    mask: Tensor
    """[R, 1, 1, pages * 16] 0 where seen, -inf where not."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence that computes several positions."""

    first: int
    end: int
    table: Tensor
    """[pages]"""
    mask: Tensor
    """[rows, pages * 16] 0 where seen, -inf where not."""


class PagedAttention:
    """Attention of one engine step: stores the new keys and values, then attends to all up to them."""

    def __init__(self, cache: PagedCache, rows: StepRows) -> None:
        self._cache = cache
        self._pages = torch.from_numpy(rows.pages.astype(np.int64))
        self._offsets = torch.from_numpy(rows.offsets)
        ends = np.cumsum(rows.counts)
        decoding = rows.counts == 1
        self._decode = _buckets(rows, np.flatnonzero(decoding), ends)
        self._prefill = [_prefill(rows, int(s), int(ends[s])) for s in np.flatnonzero(~decoding)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, key_dim], key [T, cache_heads, key_dim], value [T, cache_heads, value_dim] ->
        [T, heads, value_dim]."""
        cache = self._cache
        cache.keys[layer][self._pages, :, :, self._offsets] = key.to(cache.keys.dtype)
        if cache.values is not None:
            cache.values[layer][self._pages, :, self._offsets] = value.to(cache.values.dtype)
        out = query.new_empty((*query.shape[:2], cache.value_dim))
        for bucket in self._decode:
            out[bucket.rows] = self._attend_decode(layer, bucket, query[bucket.rows])
        for run in self._prefill:
            out[run.first : run.end] = self._attend_prefill(layer, run, query[run.first : run.end])
        return out

    def _attend_decode(self, layer: int, bucket: _DecodeBucket, query: Tensor) -> Tensor:
        keys, values = self._gather(layer, bucket.tables, query.dtype)
        folded = query.view(len(query), keys.shape[1], -1, keys.shape[2])
        scores = torch.matmul(folded, keys).mul_(keys.shape[2] ** -0.5).add_(bucket.mask)
        out = torch.matmul(scores.softmax(dim=-1), values)
        return out.view(len(query), query.shape[1], -1)

    def _attend_prefill(self, layer: int, run: _Prefill, query: Tensor) -> Tensor:
        keys, values = self._gather(layer, run.table[None], query.dtype)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys.transpose(2, 3), values, attn_mask=run.mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _gather(self, layer: int, tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """tables [R, pages] -> keys [R, heads, key_dim, L] and values [R, heads, L, value_dim], copied and in
        the type that is computed in."""
        cache, (count, pages) = self._cache, tables.shape
        length = pages * PAGE_TOKENS
        keys = cache.keys[layer][tables].to(dtype).permute(0, 2, 3, 1, 4)
        keys = keys.reshape(count, keys.shape[1], keys.shape[2], length)
        if cache.values is None:
            return keys, keys[:, :, : cache.value_dim].transpose(2, 3)
        values = cache.values[layer][tables].to(dtype).permute(0, 2, 1, 3, 4)
        return keys, values.reshape(count, values.shape[1], length, cache.value_dim)


def _buckets(rows: StepRows, sequences: NDArray[np.int64], ends: NDArray[np.int64]) -> list[_DecodeBucket]:
    """Decoding sequences by the binary logarithm of their pages, so that padding stays under one half."""
    lengths = rows.starts[sequences] + 1
    num_pages = -(-lengths // PAGE_TOKENS)
    sizes = np.ceil(np.log2(num_pages)).astype(np.int64)
    buckets: list[_DecodeBucket] = []
    for size in np.unique(sizes).tolist():
        inside = np.flatnonzero(sizes == size)
        pages = int(num_pages[inside].max())
        members = sequences[inside]
        tables = torch.from_numpy(rows.tables[members, :pages].astype(np.int64))
        mask = _mask(lengths[inside], pages * PAGE_TOKENS)[:, None, None]
        buckets.append(_DecodeBucket(torch.from_numpy(ends[members] - 1), tables, mask))
    return buckets


def _prefill(rows: StepRows, sequence: int, end: int) -> _Prefill:
    count, start = int(rows.counts[sequence]), int(rows.starts[sequence])
    pages = -(-(start + count) // PAGE_TOKENS)
    table = torch.from_numpy(rows.tables[sequence, :pages].astype(np.int64))
    mask = _mask(np.arange(start + 1, start + count + 1), pages * PAGE_TOKENS)
    return _Prefill(end - count, end, table, mask)


def _mask(seen: NDArray[np.int64], length: int) -> Tensor:
    """[R, length]: 0 at the first seen[r] places, -inf behind them."""
    hidden = torch.arange(length) >= torch.from_numpy(seen)[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
