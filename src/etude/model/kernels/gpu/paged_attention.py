"""Paged attention of one engine step, for prefill and decode rows alike.

A program takes a tile: a few consecutive rows of one sequence, and up to 16 query heads that read one head of
the cache. Keys are processed page by page in an order that depends only on the row's position. Long sequences
are cut into splits of a fixed number of pages, whose results are joined in order (flash decoding), so a row's
bits depend neither on the batch nor on the lengths of other sequences.

A row at position -1 is padding: it is not stored, attends to nothing and gets zeros.

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
MAX_TILE_HEADS = 16
"""Query heads of one tile: with the widest values, more would not fit into registers."""
_BLOCK_PAGES = 4
_MIN_ROWS = 16
"""Rows of the smallest matrix product that tensor cores support."""
_WIDE_KEY = 256
"""Keys wider than this are loaded one block ahead instead of two, to fit into shared memory, and computed by
twice as many warps, to fit into registers."""


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


def store_rows(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor | None,
    tables: Tensor,
    sequence: Tensor,
    positions: Tensor,
) -> None:
    """Writes each row's key and value to its page, except for rows at position -1.

    key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim] may have any strides but the last; keys and
    values as in `paged_attention`; sequence [T]: each row's table; positions [T].
    """
    num_rows, heads, key_dim = key.shape
    value_dim = 1 if values is None else value.shape[2]
    _store[(num_rows, heads)](
        key,
        value,
        keys,
        keys if values is None else values,
        tables,
        sequence,
        positions,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        tables.stride(0),
        HEADS=heads,
        KEY=key_dim,
        VALUE=value_dim,
        KEY_BLOCK=triton.next_power_of_2(key_dim),
        VALUE_BLOCK=triton.next_power_of_2(value_dim),
        HAS_VALUES=values is not None,
        PAGE=PAGE_TOKENS,
    )


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
    """Attention of every row to positions 0 .. its own. Never synchronises with the device.

    query [T, heads, key_dim], rows of any stride; keys [pages, kv_heads, key_dim, 16]; values [pages,
    kv_heads, 16, value_dim], or None if a value is the first `value_dim` entries of its key; tables [S,
    max_pages] int32, rows of any stride; positions [T]. Returns [T, heads, value_dim] in the query's dtype;
    sums are float32.

    Raises ValueError for head widths that the tiles do not support.
    """
    num_rows, heads, key_dim = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    main_dim, tail_dim = _cut_key(key_dim, value_dim, values is None)
    if query.stride(2) != 1 or query.stride(1) != key_dim:
        query = query.contiguous()
    splits = -(-tables.shape[1] // SPLIT_PAGES)
    out = torch.empty((num_rows, heads, value_dim), dtype=query.dtype, device=query.device)
    partial = torch.empty((splits, num_rows, heads, value_dim), dtype=torch.float32, device=query.device)
    statistics = torch.empty((splits, num_rows, heads, 2), dtype=torch.float32, device=query.device)
    tile_heads = min(group, MAX_TILE_HEADS)
    _attend[(len(tiles.sequence), kv_heads * triton.cdiv(group, tile_heads), splits)](
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
        query.stride(0),
        tables.stride(0),
        scale,
        KV_HEADS=kv_heads,
        GROUP=group,
        TILE_HEADS=tile_heads,
        TILE=max(_MIN_ROWS, triton.next_power_of_2(tiles.rows_per_tile * tile_heads)),
        MAIN=main_dim,
        TAIL=tail_dim,
        VALUE=value_dim,
        VALUE_IN_KEY=values is None,
        PAGE=PAGE_TOKENS,
        BLOCK=_BLOCK_PAGES * PAGE_TOKENS,
        SPLIT=SPLIT_PAGES * PAGE_TOKENS,
        num_stages=2 if key_dim > _WIDE_KEY else 3,
        num_warps=8 if key_dim > _WIDE_KEY else 4,
    )
    _join[(num_rows, heads)](partial, statistics, out, num_rows, splits, HEADS=heads, VALUE=value_dim)
    return out


def _cut_key(key_dim: int, value_dim: int, value_in_key: bool) -> tuple[int, int]:
    """Splits a key's width into two powers of two, the second possibly 0. Raises ValueError."""
    main_dim = value_dim if value_in_key else 1 << (key_dim.bit_length() - 1)
    tail_dim = key_dim - main_dim
    if any(dim & (dim - 1) or 0 < dim < 16 for dim in (main_dim, tail_dim, value_dim)):
        raise ValueError(
            f"head widths must be powers of two of at least 16, or keys two of them: {key_dim}, {value_dim}"
        )
    return main_dim, tail_dim


@triton.jit
def _store(
    key,
    value,
    keys,
    values,
    tables,
    sequence,
    positions,
    key_row,
    key_head,
    value_row,
    value_head,
    table_stride,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Stores one row's key and value of one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position >= 0:
        table = tables + tl.load(sequence + row).to(tl.int64) * table_stride
        page = tl.load(table + position // PAGE).to(tl.int64) * HEADS + head
        columns = tl.arange(0, KEY_BLOCK)
        k = tl.load(key + row * key_row + head * key_head + columns, mask=columns < KEY)
        tl.store(keys + (page * KEY + columns) * PAGE + position % PAGE, k, mask=columns < KEY)
        if HAS_VALUES:
            places = tl.arange(0, VALUE_BLOCK)
            v = tl.load(value + row * value_row + head * value_head + places, mask=places < VALUE)
            tl.store(values + (page * PAGE + position % PAGE) * VALUE + places, v, mask=places < VALUE)


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
    query_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
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
    CHUNKS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    tile, kv_head, split = tl.program_id(0), tl.program_id(1) // CHUNKS, tl.program_id(2)
    member = tl.arange(0, TILE)
    place_in_group = tl.program_id(1) % CHUNKS * TILE_HEADS + member % TILE_HEADS
    inside = (member < tl.load(num_rows + tile) * TILE_HEADS) & (place_in_group < GROUP)
    row = (tl.load(first_row + tile) + member // TILE_HEADS).to(tl.int64)
    head = kv_head * GROUP + place_in_group
    position = tl.load(positions + row, mask=inside, other=-1)
    end = tl.minimum(tl.max(position, axis=0) + 1, (split + 1) * SPLIT)
    queries = query + row * query_stride + head * (MAIN + TAIL)
    q_main = _load_queries(queries, inside, 0, MAIN)
    q_tail = q_main
    if TAIL > 0:
        q_tail = _load_queries(queries, inside, MAIN, TAIL)
    best = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, VALUE], tl.float32)
    table = tables + tl.load(sequence + tile).to(tl.int64) * table_stride
    for start in range(split * SPLIT, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        valid = place < end
        page = tl.load(table + place // PAGE, mask=valid, other=0).to(tl.int64) * KV_HEADS + kv_head
        k_main, scores = _score_block(
            q_main, q_tail, keys + page * (MAIN + TAIL) * PAGE + place % PAGE, valid, MAIN, TAIL, PAGE
        )
        seen = valid[None, :] & (place[None, :] <= position[:, None])
        if VALUE_IN_KEY:
            v = tl.trans(k_main)
        else:
            strips = values + (page * PAGE + place % PAGE) * VALUE
            v = tl.load(strips[:, None] + tl.arange(0, VALUE)[None, :], mask=valid[:, None], other=0.0)
            v = v.to(q_main.dtype)
        scores = tl.where(seen, scores * scale, float("-inf"))
        best, weight, total = _absorb(scores, v, best, weight, total)
    place_out = (split * total_rows + row) * KV_HEADS * GROUP + head
    tl.store(statistics + place_out * 2, best, mask=inside)
    tl.store(statistics + place_out * 2 + 1, weight, mask=inside)
    if split * SPLIT < end:
        columns = tl.arange(0, VALUE)
        tl.store(partial + place_out[:, None] * VALUE + columns[None, :], total, mask=inside[:, None])


@triton.jit
def _load_queries(queries, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Columns FIRST .. FIRST + WIDTH of a tile's queries; zeros for members outside."""
    columns = FIRST + tl.arange(0, WIDTH)
    return tl.load(queries[:, None] + columns[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _score_block(q_main, q_tail, strips, valid, MAIN: tl.constexpr, TAIL: tl.constexpr, PAGE: tl.constexpr):
    """Products of a tile's queries with a block of keys, before the scale; and the keys' first part."""
    main = tl.arange(0, MAIN)
    k_main = tl.load(strips[None, :] + main[:, None] * PAGE, mask=valid[None, :], other=0.0)
    k_main = k_main.to(q_main.dtype)
    scores = tl.dot(q_main, k_main, input_precision="ieee")
    if TAIL > 0:
        tail = MAIN + tl.arange(0, TAIL)
        k_tail = tl.load(strips[None, :] + tail[:, None] * PAGE, mask=valid[None, :], other=0.0)
        k_tail = k_tail.to(q_tail.dtype)
        scores += tl.dot(q_tail, k_tail, input_precision="ieee")
    return k_main, scores


@triton.jit
def _absorb(scores, v, best, weight, total):
    """One step of online softmax: updates maximum, weight and sums with a block of scores and values."""
    higher = tl.maximum(best, tl.max(scores, axis=1))
    # A row without any keys so far has no maximum: its terms are all 0, not 0/0.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp(scores - anchor[:, None])
    fade = tl.exp(best - anchor)
    total = total * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
    return higher, weight * fade + tl.sum(shares, axis=1), total


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
    mean = total / tl.where(weight > 0.0, weight, 1.0)
    tl.store(out + (row * HEADS + head) * VALUE + columns, mean.to(out.dtype.element_ty))
