"""Batch-invariant operations, with which the trainer's module is bitwise equal to the engine.

Forward passes use the engine's own native kernels, or sum in the same order: a row's result depends neither
on the other rows nor on the number of threads. Backward passes are those of the default operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from etude.errors import ResourceError
from etude.model import flash, fused, products
from etude.model.attention import PackedAttention
from etude.model.experts import mix_by_expert
from etude.model.kernels.native import calls, load_library
from etude.model.logprobs import head_logprobs
from etude.model.ops import Ops

_RowFunction = Callable[[Tensor, int], Tensor]


class InvariantOps(Ops):
    """`Ops` whose results are functions of their row alone. Float32 on a CPU only."""

    def __init__(self) -> None:
        """Raises ResourceError if the native kernels cannot be compiled."""
        load_library()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        _check(x, weight)
        return products.linear(x, weight, as_engine=True)

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        _check(x, weight, residual)
        return products.linear(x, weight, residual, as_engine=True)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        _check(x, weight)
        return products.per_head(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check(x, weight)
        return fused.rms_norm(x, weight, eps, as_engine=True)

    def rotate(self, x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        _check(x, cosine, signed_sine)
        return fused.rotate(x, cosine, signed_sine, as_engine=True)

    def silu_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        _check(gate, up)
        return fused.silu_gate(gate, up, as_engine=True)

    def router(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x, weight)

    def activate(self, scores: Tensor, activation: Literal["softmax", "sigmoid"]) -> Tensor:
        return _each_row(calls.softmax if activation == "softmax" else calls.sigmoid, scores)

    def gates(self, activated: Tensor, chosen: Tensor, normalise: bool, scale: float) -> Tensor:
        gates = activated.gather(-1, chosen)
        if normalise:
            total = gates[:, :1]
            for column in range(1, gates.shape[1]):  # one by one: the order of the native pass
                total = total + gates[:, column : column + 1]
            gates = gates / total
        return gates if scale == 1.0 else gates * scale

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        _check(x, gate_up, down, weights)
        return mix_by_expert(x, gate_up, down, chosen, weights, as_engine=True)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return self.linear(hidden, head)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return _each_row(calls.log_softmax, logits)

    def logprobs(
        self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        _check(hidden, head)
        return head_logprobs(hidden, head, tokens, temperature, as_engine=True)

    def packed_attention(self, attention: PackedAttention) -> InvariantPackedAttention:
        return InvariantPackedAttention(attention.lengths, unused=attention.unused)


class InvariantPackedAttention(PackedAttention):
    """Computes page by page, as the engine does."""

    @cached_property
    def _pages(self) -> calls.PackedPages:
        return calls.PackedPages(self.lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, dim], key [T, kv_heads, dim], value [T, kv_heads, value_dim] -> [T, heads,
        value_dim]. Values narrower than keys must be a view of the first entries of the only key head."""
        if value.shape[-1] < key.shape[-1] and not _begins(key, value):
            raise ResourceError(
                "batch-invariant attention supports narrower values only at the start of one key head",
                field="value",
                received=f"keys of {tuple(key.shape[1:])}, values of {tuple(value.shape[1:])}",
                fix="use the default operations",
            )
        _check(query, key, value)
        return flash.attend(query, key, value, self._starts, self.unused, self._pages)


def _begins(key: Tensor, value: Tensor) -> bool:
    """Whether `value` is a view of the first entries of a single key head."""
    return key.shape[1] == 1 and value.data_ptr() == key.data_ptr() and value.stride() == key.stride()


class _EachRow(torch.autograd.Function):
    """A function of `calls` over the last dimension; its gradient is a function of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: _RowFunction) -> Tensor:
        ctx.function, out = function, function(x, torch.get_num_threads())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        if ctx.function is calls.softmax:
            return torch.ops.aten._softmax_backward_data(gradient, out, -1, out.dtype), None
        if ctx.function is calls.sigmoid:
            return torch.ops.aten.sigmoid_backward(gradient, out), None
        return gradient - out.exp() * gradient.sum(-1, keepdim=True), None

    backward: Any = staticmethod(once_differentiable(_backward))


def _each_row(function: _RowFunction, x: Tensor) -> Tensor:
    _check(x)
    return cast(Tensor, _EachRow.apply(x, function))


def _check(*inputs: Tensor) -> None:
    """Raises ResourceError for inputs that the native kernels do not support."""
    for x in inputs:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise ResourceError(
                "batch-invariant operations support only float32 on a CPU",
                field="model.ops",
                received=f"{x.dtype} on {x.device}",
                fix="use float32 weights on the CPU, or the default operations",
            )
