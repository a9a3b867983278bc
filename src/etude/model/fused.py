"""Pointwise parts of a block with gradients written out, for training on a CPU.

Autograd runs one operator per step of a formula, forwards and backwards, and each reads and writes all rows.
Written out, a norm, a rotation or a gate takes half as many passes over memory and keeps less for the
backward pass. Each sums in a fixed order.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """x [..., n], weight [n] -> x / root of the mean square * weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        (gradient,) = gradients
        to_weight = None
        if ctx.needs_input_grad[1]:
            products = (gradient * x).reshape(-1, x.shape[-1])
            to_weight = (inverse.reshape(1, -1) @ products).squeeze(0)
        to_x = gradient * weight
        share = (to_x * x).sum(-1, keepdim=True).mul_(inverse**3).div_(-x.shape[-1])
        return to_x.mul_(inverse).addcmul_(x, share), to_weight, None


class _Rotation(torch.autograd.Function):
    """x [T, heads, n] times the cosine, its swapped halves times the signed sine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, signed_sine)
        half = x.shape[-1] // 2
        out = x * cosine
        out[..., :half].addcmul_(x[..., half:], signed_sine[..., :half])
        out[..., half:].addcmul_(x[..., :half], signed_sine[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, signed_sine = ctx.saved_tensors
        (gradient,) = gradients
        half = gradient.shape[-1] // 2
        to_x = gradient * cosine
        to_x[..., half:].addcmul_(gradient[..., :half], signed_sine[..., :half])
        to_x[..., :half].addcmul_(gradient[..., half:], signed_sine[..., half:])
        return to_x, None, None


class _SiluGate(torch.autograd.Function):
    """silu(gate) * up, which keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (gradient,) = gradients
        return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n]; in the type of x."""
    return cast(Tensor, _RmsNorm.apply(x, weight, eps))


def rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """See Ops.rotate; the tables get no gradient."""
    return cast(Tensor, _Rotation.apply(x, cosine, signed_sine))


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """See Ops.silu_gate."""
    return cast(Tensor, _SiluGate.apply(gate, up))
