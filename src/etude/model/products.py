"""Products of a training step on a CPU, with the native kernels if they are faster than PyTorch's library.

That is the case on AMD processors: the native products run at 1.0 to 1.1 times the rate of MKL, PyTorch's
float32 library, and an expert's two products and its gate are one call. On other processors, and for other
types, PyTorch's are used.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from etude.model.kernels.native import training

_LEAST_TERMS = 1 << 15
"""Products with fewer multiplications cost less than the overhead of a native call."""


def product(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """a [m, k] b [k, n] -> [m, n], written or (`add`) added to `out` if given. No gradient."""
    if a.shape[0] * a.shape[1] * b.shape[1] >= _LEAST_TERMS and training.multiplies(a, b):
        into = a.new_empty((a.shape[0], b.shape[1])) if out is None else out
        return training.multiply(a, b, into, add=add and out is not None)
    if out is None:
        return a @ b
    return out.addmm_(a, b) if add else torch.mm(a, b, out=out)


def engine_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [m, k] b [k, n] -> [m, n], bitwise equal to the engine's product of each row, written to `out` if
    given; float32 on a CPU. No gradient."""
    into = a.new_empty((a.shape[0], b.shape[1])) if out is None else out
    return training.multiply(a, b, into, as_engine=True)


class _Linear(torch.autograd.Function):
    """x [T, in], weight [out, in], residual [T, out] or None -> residual + x weight^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, as_engine: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        if as_engine:
            out = engine_product(x, weight.t())
            return out if residual is None else out.add_(residual)
        if residual is None:
            return product(x, weight.t())
        return product(x, weight.t(), residual.clone(memory_format=torch.contiguous_format), add=True)

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        to_x = product(gradient, weight) if ctx.needs_input_grad[0] else None
        to_weight = product(gradient.t(), x) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, gradient if ctx.needs_input_grad[2] else None, None

    backward: Any = staticmethod(once_differentiable(_backward))


def linear(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, as_engine: bool = False) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], plus `residual` [T, out] if given.

    `as_engine`: bitwise equal to the engine, see `engine_product`.
    """
    return cast(Tensor, _Linear.apply(x, weight, residual, as_engine))


class _PerHead(torch.autograd.Function):
    """x [T, heads, in], weight [heads, out, in] -> [T, heads, out], bitwise equal to the engine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty((*x.shape[:2], weight.shape[1]))
        for head in range(len(weight)):
            engine_product(x[:, head], weight[head].t(), out[:, head])
        return out

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            for head in range(len(weight)):
                product(gradient[:, head], weight[head], to_x[:, head])
        if ctx.needs_input_grad[1]:
            to_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            for head in range(len(weight)):
                product(gradient[:, head].t(), x[:, head], to_weight[head])
        return to_x, to_weight

    backward: Any = staticmethod(once_differentiable(_backward))


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, heads, in], weight [heads, out, in] (any strides) -> [T, heads, out], bitwise equal to the
    engine; float32 on a CPU."""
    return cast(Tensor, _PerHead.apply(x, weight))
