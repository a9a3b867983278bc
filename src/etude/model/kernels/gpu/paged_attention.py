"""Attention of one engine step over a paged cache, prefilling and decoding rows alike.

A program takes a tile: a few consecutive rows of one sequence, and one head of the cache with all query
heads that read it. Keys are walked page by page in one order that depends on the row's position alone. Long
sequences are cut into splits of a fixed number of pages, whose results are joined in order (flash decoding),
so a row's bits depend neither on the batch nor on how long other sequences are.

Online softmax after Milakov and Gimelshein (2018); tiling after FlashAttention-2 (Dao 2023) and flash
decoding (Dao and others 2023); paging after vLLM (Kwon and others 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

PAGE_TOKENS = 16
SPLIT_PAGES = 64
"""Pages of one split: 1,024 tokens."""
_BLOCK_PAGES = 4
_MIN_ROWS = 16
"""Rows of the smallest matrix product that tensor cores take."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a step, cut into tiles that lie within one sequence. On the device of the batch."""

    first_row: Tensor
    """[N] int32"""
    num_rows: Tensor
    """[N] int32"""
    sequence: Tensor
    """[N] int32 row of the page tables."""
    rows_per_tile: int

    @staticmethod
    def plan(counts: NDArray[np.int64], rows_per_tile: int, device: torch.device) -> Tiles:
        """`counts` [S]: consecutive rows of each sequence, in the order of the page tables."""
        tiles = -(-counts // rows_per_tile)
        sequence = np.repeat(np.arange(len(counts)), tiles)
        within = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * rows_per_tile
        first = (np.cumsum(counts) - counts)[sequence] + within
        rows = np.minimum(rows_per_tile, counts[sequence] - within)
        tensors = (torch.from_numpy(a.astype(np.int32)).to(device) for a in (first, rows, sequence))
        return Tiles(*tensors, rows_per_tile)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    tables: Tensor,
    positions: Tensor,
    tiles: Tiles,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Attention of every row to positions 0 .. its own. Nothing waits for the device.

    query [T, heads, key_dim]; keys [pages, kv_heads, key_dim, 16]; values [pages, kv_heads, 16, value_dim],
    or None where a value is the first `value_dim` entries of its key; tables [S, max_pages] int32;
    positions [T]. Returns [T, heads, value_dim] in the query's dtype; sums are float32.

    Raises ValueError for head widths that the tiles cannot take.
    """
    num_rows, heads, key_dim = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    splits = -(-tables.shape[1] // SPLIT_PAGES)
    out = torch.empty((num_rows, heads, value_dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((splits, num_rows, heads, value_dim), dtype=torch.float32, device=query.device)
    statistics = torch.empty((splits, num_rows, heads, 2), dtype=torch.float32, device=query.device)
    main_dim = value_dim if values is None else 1 << (key_dim.bit_length() - 1)
    tail_dim = key_dim - main_dim
    if any(dim & (dim - 1) for dim in (main_dim, tail_dim, value_dim)):
        raise ValueError(f"head widths must be powers of two, or keys two of them: {key_dim}, {value_dim}")
    _attend[(len(tiles.sequence), kv_heads, splits)](
        query,
        keys,
        keys if values is None else values,
        tables,
        positions,
        tiles.first_row,
        tiles.num_rows,
        tiles.sequence,
        partial,
        statistics,
        num_rows,
        tables.shape[1],
        scale,
        KV_HEADS=kv_heads,
        GROUP=group,
        TILE=max(_MIN_ROWS, triton.next_power_of_2(tiles.rows_per_tile * group)),
        MAIN=main_dim,
        TAIL=tail_dim,
        VALUE=value_dim,
        VALUE_IN_KEY=values is None,
        PAGE=PAGE_TOKENS,
        BLOCK=_BLOCK_PAGES * PAGE_TOKENS,
        SPLIT=SPLIT_PAGES * PAGE_TOKENS,
    )
    _join[(num_rows, heads)](partial, statistics, out, num_rows, splits, HEADS=heads, VALUE=value_dim)
    return out


@triton.jit
def _attend(
    query,
    keys,
    values,
    tables,
    positions,
    first_row,
    num_rows,
    sequence,
    partial,
    statistics,
    total_rows,
    max_pages,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile, one head of the cache, one split -> its unnormalised sums, and their maximum and weight."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KEY: tl.constexpr = MAIN + TAIL
    member = tl.arange(0, TILE)
    inside = member < tl.load(num_rows + tile) * GROUP
    row = (tl.load(first_row + tile) + member // GROUP).to(tl.int64)
    head = kv_head * GROUP + member % GROUP
    position = tl.load(positions + row, mask=inside, other=-1)
    end = tl.minimum(tl.max(position, axis=0) + 1, (split + 1) * SPLIT)

    queries = query + (row * KV_HEADS * GROUP + head) * KEY
    main = tl.arange(0, MAIN)
    q_main = tl.load(queries[:, None] + main[None, :], mask=inside[:, None], other=0.0)
    if TAIL > 0:
        tail = MAIN + tl.arange(0, TAIL)
        q_tail = tl.load(queries[:, None] + tail[None, :], mask=inside[:, None], other=0.0)

    best = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, VALUE], tl.float32)
    table = tables + tl.load(sequence + tile).to(tl.int64) * max_pages
    for start in range(split * SPLIT, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        held = place < end
        page = tl.load(table + place // PAGE, mask=held, other=0).to(tl.int64)
        strip = (page * KV_HEADS + kv_head) * KEY * PAGE + place % PAGE
        k_main = tl.load(keys + strip[None, :] + main[:, None] * PAGE, mask=held[None, :], other=0.0)
        scores = tl.dot(q_main, k_main, input_precision="ieee")
        if TAIL > 0:
            k_tail = tl.load(keys + strip[None, :] + tail[:, None] * PAGE, mask=held[None, :], other=0.0)
            scores += tl.dot(q_tail, k_tail, input_precision="ieee")
        seen = held[None, :] & (place[None, :] <= position[:, None])
        scores = tl.where(seen, scores * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no maximum: its terms are all 0, not 0/0.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp(scores - anchor[:, None])
        fade = tl.exp(best - anchor)
        if VALUE_IN_KEY:
            v = tl.trans(k_main)
        else:
            rows = (page * KV_HEADS + kv_head) * PAGE + place % PAGE
            columns = tl.arange(0, VALUE)
            v = tl.load(values + rows[:, None] * VALUE + columns[None, :], mask=held[:, None], other=0.0)
        total = total * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        weight = weight * fade + tl.sum(shares, axis=1)
        best = higher

    place_out = (split * total_rows + row) * KV_HEADS * GROUP + head
    columns_out = tl.arange(0, VALUE)
    tl.store(partial + place_out[:, None] * VALUE + columns_out[None, :], total, mask=inside[:, None])
    tl.store(statistics + place_out * 2, best, mask=inside)
    tl.store(statistics + place_out * 2 + 1, weight, mask=inside)


@triton.jit
def _join(partial, statistics, out, total_rows, splits, HEADS: tl.constexpr, VALUE: tl.constexpr):
    """The splits of one row and head, in their order -> the weighted mean of the values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, VALUE)
    best = tl.full([], float("-inf"), tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    total = tl.zeros([VALUE], tl.float32)
    for split in range(splits):
        place = (split * total_rows + row) * HEADS + head
        other, share = tl.load(statistics + place * 2), tl.load(statistics + place * 2 + 1)
        if share > 0.0:
            higher = tl.maximum(best, other)
            fade, gain = tl.exp(best - higher), tl.exp(other - higher)
            total = total * fade + tl.load(partial + place * VALUE + columns) * gain
            weight = weight * fade + share * gain
            best = higher
    tl.store(out + (row * HEADS + head) * VALUE + columns, (total / weight).to(out.dtype.element_ty))
