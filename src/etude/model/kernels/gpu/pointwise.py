"""Pointwise operations of a decoding step as single kernels, since launches dominate its cost.

Not differentiable. Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """See `Ops.silu_gate`: gate and up [T, inner], rows of any stride."""
    num_rows, inner = gate.shape
    out = torch.empty((num_rows, inner), dtype=gate.dtype, device=gate.device)
    _silu_gate[(num_rows, triton.cdiv(inner, _BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), inner, BLOCK=_BLOCK
    )
    return out


def rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """See `Ops.rotate`: x [T, heads, n] of any strides but the last, tables [T, 1, n]."""
    num_rows, heads, width = x.shape
    out = torch.empty((num_rows, heads, width), dtype=x.dtype, device=x.device)
    _rotate[(num_rows, heads)](
        x,
        cosine,
        signed_sine,
        out,
        x.stride(0),
        x.stride(1),
        cosine.stride(0),
        signed_sine.stride(0),
        HEADS=heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )
    return out


@triton.jit
def _silu_gate(gate, up, out, gate_row, up_row, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < inner
    g = tl.load(gate + row * gate_row + column, mask=valid, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=valid)


@triton.jit
def _rotate(
    x,
    cosine,
    signed_sine,
    out,
    x_row,
    x_head,
    cosine_row,
    sine_row,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    valid = column < WIDTH
    source = x + row * x_row + head * x_head
    own = tl.load(source + column, mask=valid, other=0.0).to(tl.float32)
    other = tl.load(source + (column + WIDTH // 2) % WIDTH, mask=valid, other=0.0).to(tl.float32)
    cos = tl.load(cosine + row * cosine_row + column, mask=valid, other=0.0).to(tl.float32)
    sin = tl.load(signed_sine + row * sine_row + column, mask=valid, other=0.0).to(tl.float32)
    turned = own * cos + other * sin
    tl.store(out + (row * HEADS + head) * WIDTH + column, turned.to(out.dtype.element_ty), mask=valid)
