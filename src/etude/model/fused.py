"""Fused pointwise operations of a block with explicit gradients, for training on a CPU.

Autograd runs one operator per step of a formula, forward and backward, and each reads and writes all rows.
Fused, a norm, a rotation or a gate takes half as many passes over memory and keeps less for the backward
pass. Each sums in a fixed order.

`as_engine`: float32, bitwise equal to the engine's forward pass; gradients are computed the same either way.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from etude.model.kernels.native import pointwise, training


class _RmsNorm(torch.autograd.Function):
    """x [..., n], weight [n] -> x / root of the mean square * weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, as_engine: bool) -> Tensor:
        ctx.is_native = as_engine or (x.ndim in (2, 3) and training.computes(x, weight))
        if ctx.is_native:
            out, inverse = pointwise.rms_norm(x, weight, eps, as_engine=as_engine)
        else:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out = (x * inverse).mul_(weight)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        if ctx.is_native:
            return *pointwise.rms_norm_backward(gradient, x, weight, inverse), None, None
        to_weight = None
        if ctx.needs_input_grad[1]:
            products = (gradient * x).reshape(-1, x.shape[-1])
            to_weight = (inverse.reshape(1, -1) @ products).squeeze(0)
        to_x = gradient * weight
        share = (to_x * x).sum(-1, keepdim=True).mul_(inverse**3).div_(-x.shape[-1])
        return to_x.mul_(inverse).addcmul_(x, share), to_weight, None, None

    backward: Any = staticmethod(once_differentiable(_backward))


class _Rotation(torch.autograd.Function):
    """x [T, heads, n] times the cosine, its swapped halves times the signed sine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, signed_sine: Tensor, as_engine: bool) -> Tensor:
        ctx.save_for_backward(cosine, signed_sine)
        ctx.as_engine = as_engine
        if as_engine:
            return pointwise.rotate(x, cosine, signed_sine)
        half = x.shape[-1] // 2
        out = x * cosine
        out[..., :half].addcmul_(x[..., half:], signed_sine[..., :half])
        out[..., half:].addcmul_(x[..., :half], signed_sine[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, signed_sine = ctx.saved_tensors
        (gradient,) = gradients
        if ctx.as_engine:
            return pointwise.rotate(gradient, cosine, signed_sine, backwards=True), None, None, None
        half = gradient.shape[-1] // 2
        to_x = gradient * cosine
        to_x[..., half:].addcmul_(gradient[..., :half], signed_sine[..., :half])
        to_x[..., :half].addcmul_(gradient[..., half:], signed_sine[..., half:])
        return to_x, None, None, None


class _SiluGate(torch.autograd.Function):
    """silu(gate) * up; only the inputs are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, as_engine: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.is_native = as_engine or (gate.ndim == 2 and training.computes(gate, up))
        if ctx.is_native:
            return pointwise.silu_gate(gate, up, as_engine=as_engine)
        return F.silu(gate).mul_(up)

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if ctx.is_native:
            to_gate, to_up = pointwise.silu_gate_backward(gradient, gate, up)[1].chunk(2, dim=-1)
            return to_gate, to_up, None
        return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient), None

    backward: Any = staticmethod(once_differentiable(_backward))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, as_engine: bool = False) -> Tensor:
    """x [..., n] (as the engine, of two or three dimensions), weight [n]; in the type of x."""
    return cast(Tensor, _RmsNorm.apply(x, weight, eps, as_engine))


def rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor, *, as_engine: bool = False) -> Tensor:
    """See Ops.rotate; the tables get no gradient."""
    return cast(Tensor, _Rotation.apply(x, cosine, signed_sine, as_engine))


def silu_gate(gate: Tensor, up: Tensor, *, as_engine: bool = False) -> Tensor:
    """See Ops.silu_gate."""
    return cast(Tensor, _SiluGate.apply(gate, up, as_engine))


def scaled_gate(opened: Tensor, scale: Tensor) -> Tensor:
    """silu(gate) * up * scale for gate and up side by side: opened [T, 2 n], scale [T, 1]. No gradient."""
    gate, up = opened.chunk(2, dim=-1)
    if training.computes(opened, scale):
        return pointwise.silu_gate(gate, up, scale)
    return F.silu(gate).mul_(up).mul_(scale)


def scaled_gate_backward(
    to_out: Tensor, opened: Tensor, scale: Tensor, to_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Recomputed `scaled_gate`, and the gradient of `opened`; writes that of `scale` to `to_scale` [T, 1]."""
    gate, up = opened.chunk(2, dim=-1)
    if training.computes(to_out, opened, scale, to_scale):
        return pointwise.silu_gate_backward(to_out, gate, up, scale, to_scale)
    risen = F.silu(gate)
    inner = risen * up
    to_scale.copy_(torch.linalg.vecdot(to_out, inner).unsqueeze(-1))
    to_inner = to_out * scale
    to_opened = torch.cat((torch.ops.aten.silu_backward(to_inner * up, gate), to_inner.mul_(risen)), 1)
    return inner.mul_(scale), to_opened
