"""Ops on a GPU: PyTorch's operators, and custom kernels where these are faster.

With bfloat16 weights, the router, the output head and the sum over experts are computed in float32, as on a
CPU: products of bfloat16 numbers are exact in float32, so accumulating there needs no copies of the weights.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.model.attention import PackedAttention
from etude.model.kernels.gpu.experts import MAX_ROWS, mix_few_rows
from etude.model.kernels.gpu.pointwise import rotate, silu_gate
from etude.model.kernels.gpu.varlen import VarlenAttention
from etude.model.ops import Ops, TorchOps


class GpuOps(TorchOps):
    """`TorchOps` with fixed-shape kernels when gradients are off, and float32 products of bfloat16."""

    def rotate(self, x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.stride(-1) != 1:
            return super().rotate(x, cosine, signed_sine)
        return rotate(x, cosine, signed_sine)

    def silu_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().silu_gate(gate, up)
        return silu_gate(gate, up)

    def router(self, x: Tensor, weight: Tensor) -> Tensor:
        return _float32_product(x, weight)

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if torch.is_grad_enabled() or len(x) > MAX_ROWS:
            return super().experts(x, gate_up, down, chosen, weights)
        return mix_few_rows(x.contiguous(), gate_up, down, chosen.contiguous(), weights.contiguous())

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return _float32_product(hidden, head)

    def logprobs(
        self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        if _is_half_on_gpu(hidden, head):
            # Not TorchOps': it multiplies float32 copies, at a fraction of the rate of 16-bit products.
            return Ops.logprobs(self, hidden, head, tokens, temperature)
        return super().logprobs(hidden, head, tokens, temperature)

    def packed_attention(self, attention: PackedAttention) -> VarlenAttention:
        return VarlenAttention(attention)


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out] float32."""
    if _is_half_on_gpu(x, weight):
        return cast(Tensor, _WideProduct.apply(x, weight))
    return F.linear(x.float(), weight.float())


def _is_half_on_gpu(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


class _WideProduct(torch.autograd.Function):
    """x [T, in], weight [out, in], both of 16 bits -> [T, out] float32; its gradient is rounded to 16 bits
    before the products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].to(x.dtype)
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        to_weight = gradient.t() @ x if ctx.needs_input_grad[1] else None
        return to_x, to_weight
