"""Packed attention with native kernels, forward and backward: without padding and without stored scores."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from etude.model.kernels.native import training
from etude.model.kernels.native.calls import PackedPages


class _Attention(torch.autograd.Function):
    """See `attend`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: NDArray[np.int64],
        unused: NDArray[np.int64] | None,
        pages: PackedPages | None,
    ) -> Tensor:
        if pages is None:
            out, log_sums = training.attend(query, key, value, starts, unused)
        else:
            out, log_sums = pages.attend(query, key, value)
        ctx.starts, ctx.unused = starts, unused
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def _backward(ctx: Any, to_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        gradients = training.attend_backward(to_out, query, key, value, out, log_sums, ctx.starts, ctx.unused)
        return *gradients, None, None, None

    backward: Any = staticmethod(once_differentiable(_backward))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: NDArray[np.int64],
    unused: NDArray[np.int64] | None = None,
    pages: PackedPages | None = None,
) -> Tensor:
    """Causal attention within each sequence of a packed batch; float32 on a CPU, see `training.computes`.

    query [T, heads, dim], key [T, kv_heads, dim], value [T, kv_heads, value_dim], starts [sequences + 1] ->
    [T, heads, value_dim]. `unused` [sequences]: number of rows at the start of each whose results the caller
    does not use. `pages` of the same sequences: bitwise equal to the engine, see `PackedPages.attend`.
    """
    return cast(Tensor, _Attention.apply(query, key, value, starts, unused, pages))
