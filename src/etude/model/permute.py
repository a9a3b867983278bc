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


class _Permute(torch.autograd.Function):
    """rows [N, ...] -> the same rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


class _Pad(torch.autograd.Function):
    """rows [T, ...] -> padded [P, ...]; `source[p]` is the row at position p, or T for padding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        zero = rows.new_zeros((1, *rows.shape[1:]))
        return torch.cat((rows, zero)).index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradients[0].index_select(0, place), None, None


class _Unpad(torch.autograd.Function):
    """padded [P, ...] -> rows [T, ...]: the inverse of `pad`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return padded.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (source,) = ctx.saved_tensors
        (gradient,) = gradients
        zero = gradient.new_zeros((1, *gradient.shape[1:]))
        return torch.cat((gradient, zero)).index_select(0, source), None, None


def dispatch(rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """rows [T, D] -> [T * copies, D]: copy `order[i] % copies` of row `order[i] // copies` at i."""
    return cast(Tensor, _Dispatch.apply(rows, order, inverse, copies))


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows [N, ...] -> rows[order]; `inverse` is the inverse permutation."""
    return cast(Tensor, _Permute.apply(rows, order, inverse))


def pad(rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
    """rows [T, ...] -> [P, ...] with zeros where `source` is T; `place[t]` is the position of row t."""
    return cast(Tensor, _Pad.apply(rows, source, place))


def unpad(padded: Tensor, source: Tensor, place: Tensor) -> Tensor:
    """padded [P, ...] -> [T, ...]."""
    return cast(Tensor, _Unpad.apply(padded, source, place))
