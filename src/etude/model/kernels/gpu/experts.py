"""A mixture of experts over the few rows of a decoding step, with shapes that do not depend on the routes.

Decoding is bound by reading weights. So a program takes one expert and a block of its columns, reads these
weights once, and multiplies them with all rows of a tile, of which it stores those that chose the expert;
experts that no row chose are not read. Nothing is sorted or counted, the host never synchronises with the
device, and a row's bits do not depend on other rows: a step can be captured as a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 256
"""With more rows, sorting them by expert and a grouped product are faster."""
_MIN_TILE, _MAX_TILE = 16, 64
_BLOCK, _DEPTH = 64, 64


def mix_few_rows(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """See `Ops.experts`; not differentiable, and each row's experts must differ. All tensors contiguous.

    The experts' inner values are rounded to the type of `x`; their outputs and the sum are float32.
    """
    (num_rows, width), (num_experts, inner, _), top_k = x.shape, down.shape, chosen.shape[1]
    gated = torch.empty((num_rows, top_k, inner), dtype=x.dtype, device=x.device)
    mixed = torch.empty((num_rows, top_k, width), dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    tile = min(_MAX_TILE, max(_MIN_TILE, triton.next_power_of_2(num_rows)))
    tiles = triton.cdiv(num_rows, tile)
    sizes = {"TOP_K": top_k, "SLOTS": triton.next_power_of_2(top_k), "WIDTH": width, "INNER": inner}
    blocks = {"TILE": tile, "BLOCK": _BLOCK, "DEPTH": _DEPTH}
    _gate_up[(tiles, triton.cdiv(inner, _BLOCK), num_experts)](
        x, gate_up, chosen, gated, num_rows, **sizes, **blocks
    )
    _down[(tiles, triton.cdiv(width, _BLOCK), num_experts)](
        gated, down, chosen, mixed, num_rows, **sizes, **blocks
    )
    _combine[(num_rows, triton.cdiv(width, 1024))](mixed, weights, out, TOP_K=top_k, WIDTH=width, BLOCK=1024)
    return out


@triton.jit
def _members(chosen, row, expert, num_rows, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """For each row [TILE]: whether it chose the expert, and at which index of its choices."""
    slot = tl.arange(0, SLOTS)
    valid = (row[:, None] < num_rows) & (slot[None, :] < TOP_K)
    hits = tl.load(chosen + row[:, None] * TOP_K + slot[None, :], mask=valid, other=-1) == expert
    return tl.sum(hits.to(tl.int32), axis=1) > 0, tl.sum(tl.where(hits, slot[None, :], 0), axis=1)


@triton.jit
def _gate_up(
    x,
    weight,
    chosen,
    gated,
    num_rows,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Rows x [T, width] -> silu(gate) * up, one block of columns of one expert, in `gated` [T, k, inner]."""
    expert = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    member, slot = _members(chosen, row, expert, num_rows, TOP_K, SLOTS)
    if tl.max(member.to(tl.int32), axis=0) > 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        base = weight + expert.to(tl.int64) * WIDTH * 2 * INNER
        gate = tl.zeros([TILE, BLOCK], tl.float32)
        up = tl.zeros([TILE, BLOCK], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            rows = tl.load(
                x + row[:, None] * WIDTH + depth[None, :],
                mask=member[:, None] & (depth[None, :] < WIDTH),
                other=0.0,
            )
            valid = (depth[:, None] < WIDTH) & (column[None, :] < INNER)
            place = base + depth[:, None] * (2 * INNER) + column[None, :]
            gate += tl.dot(rows, tl.load(place, mask=valid, other=0.0), input_precision="ieee")
            up += tl.dot(rows, tl.load(place + INNER, mask=valid, other=0.0), input_precision="ieee")
        product = gate / (1.0 + tl.exp(-gate)) * up
        out = gated + (row * TOP_K + slot)[:, None] * INNER + column[None, :]
        tl.store(out, product.to(gated.dtype.element_ty), mask=member[:, None] & (column[None, :] < INNER))


@triton.jit
def _down(
    gated,
    weight,
    chosen,
    mixed,
    num_rows,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`gated` [T, k, inner] -> one block of columns of one expert's output, in `mixed` [T, k, width]."""
    expert = tl.program_id(2)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    member, slot = _members(chosen, row, expert, num_rows, TOP_K, SLOTS)
    if tl.max(member.to(tl.int32), axis=0) > 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        base = weight + expert.to(tl.int64) * INNER * WIDTH
        total = tl.zeros([TILE, BLOCK], tl.float32)
        source = row * TOP_K + slot
        for start in range(0, INNER, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            rows = tl.load(
                gated + source[:, None] * INNER + depth[None, :],
                mask=member[:, None] & (depth[None, :] < INNER),
                other=0.0,
            )
            valid = (depth[:, None] < INNER) & (column[None, :] < WIDTH)
            place = base + depth[:, None] * WIDTH + column[None, :]
            total += tl.dot(rows, tl.load(place, mask=valid, other=0.0), input_precision="ieee")
        out = mixed + source[:, None] * WIDTH + column[None, :]
        tl.store(out, total, mask=member[:, None] & (column[None, :] < WIDTH))


@triton.jit
def _combine(mixed, weights, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One row's experts, weighted and summed in the order of its routes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(TOP_K):
        part = tl.load(mixed + (row * TOP_K + slot) * WIDTH + column, mask=column < WIDTH, other=0.0)
        total += part * tl.load(weights + row * TOP_K + slot)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)
