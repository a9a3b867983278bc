"""Row gathers whose backward pass is a gather too.

`tensor[index]` sums gradients with an indexed add, slow on a CPU and unordered on a GPU. If the index
is a permutation, the backward pass is a gather by the inverse index: fast, and summed in a fixed order.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class _Dispatch(torch.autograd.Function):
    """rows [T, D] -> copies [T * k, D], ordered by expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, order.div(copies, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        (gradient,) = gradients
        back = gradient.index_select(0, inverse)
        return back.view(-1, ctx.copies, gradient.shape[-1]).sum(1), None, None, None


class _Gather(torch.autograd.Function):
    """rows [N, ...] -> rows[index]; `back`: the index of the backward pass. `padded`: N in `index` is a row
    of zeros. `back_padded`: the same in `back`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, index: Tensor, back: Tensor, padded: bool, back_padded: bool
    ) -> Tensor:
        ctx.save_for_backward(back)
        ctx.back_padded = back_padded
        return (_with_zeros(rows) if padded else rows).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (back,) = ctx.saved_tensors
        (gradient,) = gradients
        rows = _with_zeros(gradient) if ctx.back_padded else gradient
        return rows.index_select(0, back), None, None, None, None


def _with_zeros(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros((1, *rows.shape[1:]))))


def dispatch(rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """rows [T, D] -> [T * copies, D]: copy `order[i] % copies` of row `order[i] // copies` at i."""
    return cast(Tensor, _Dispatch.apply(rows, order, inverse, copies))


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows [N, ...] -> rows[order]; `inverse` is the inverse permutation."""
    return cast(Tensor, _Gather.apply(rows, order, inverse, False, False))


def pad(rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
    """rows [T, ...] -> [P, ...] with zeros where `source` is T; `place[t]` is the position of row t."""
    return cast(Tensor, _Gather.apply(rows, source, place, True, False))


def unpad(padded: Tensor, source: Tensor, place: Tensor) -> Tensor:
    """padded [P, ...] -> [T, ...]."""
    return cast(Tensor, _Gather.apply(padded, place, source, False, True))
