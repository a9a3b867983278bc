"""The experts of one layer on a CPU, forward and backward.

Rows are sorted by expert, so that each expert's are one block of rows. Values between the two products of an
expert stay in the processor's cache. Gates are applied between the two products, to the narrower tensor (a
gate times a row's product is the product of the row times the gate), so the wide results are never kept. To
match the engine bitwise they are applied after the second product, as there; the gradients are the same.

All experts are one native call if its products are faster than PyTorch's; otherwise each expert has two
products in the forward and four in the backward pass, into preallocated buffers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from etude.model.fused import scaled_gate, scaled_gate_backward
from etude.model.kernels.native import mixture, training


class _NativeExperts(torch.autograd.Function):
    """See `mix_by_expert`; float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        chosen: Tensor,
        weights: Tensor,
        as_engine: bool,
    ) -> Tensor:
        out, made = mixture.mix(x, gate_up, down, chosen, weights, as_engine=as_engine)
        ctx.save_for_backward(gate_up, down, made.starts, made.places, made.rows, made.gates, made.opened)
        return out

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, down, *made = ctx.saved_tensors
        to_gate_up = gate_up.new_empty(gate_up.shape) if ctx.needs_input_grad[1] else None
        to_down = down.new_empty(down.shape) if ctx.needs_input_grad[2] else None
        to_x, to_weights = mixture.mix_backward(
            gradient, mixture.SortedCopies(*made), gate_up, down, to_gate_up, to_down
        )
        return to_x, to_gate_up, to_down, None, to_weights, None

    backward: Any = staticmethod(once_differentiable(_backward))


class _Experts(torch.autograd.Function):
    """See `mix_by_expert`; of any type, through PyTorch's products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        top_k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        source = order.div(top_k, rounding_mode="floor")
        sizes = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
        gates = weights.to(x.dtype).flatten()[order, None]
        rows = x.index_select(0, source)
        opened = x.new_empty((len(order), gate_up.shape[2]))
        mixed = x.new_empty((len(order), down.shape[2]))
        for expert, place in _places(sizes):
            torch.mm(rows[place], gate_up[expert], out=opened[place])
            torch.mm(scaled_gate(opened[place], gates[place]), down[expert], out=mixed[place])
        ctx.sizes, ctx.weights_dtype = sizes, weights.dtype
        ctx.save_for_backward(rows, opened, gates, gate_up, down, source, inverse)
        return _sum_copies(mixed, inverse, top_k)

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, opened, gates, gate_up, down, source, inverse = ctx.saved_tensors
        top_k = len(inverse) // len(gradient)
        back = gradient.index_select(0, source)
        to_rows, to_gates = torch.empty_like(rows), torch.empty_like(gates)
        to_gate_up = torch.zeros_like(gate_up) if ctx.needs_input_grad[1] else None
        to_down = torch.zeros_like(down) if ctx.needs_input_grad[2] else None
        for expert, place in _places(ctx.sizes):
            to_inner = back[place] @ down[expert].t()
            inner, to_opened = scaled_gate_backward(to_inner, opened[place], gates[place], to_gates[place])
            if to_down is not None:
                torch.mm(inner.t(), back[place], out=to_down[expert])
            torch.mm(to_opened, gate_up[expert].t(), out=to_rows[place])
            if to_gate_up is not None:
                torch.mm(rows[place].t(), to_opened, out=to_gate_up[expert])
        to_weights = to_gates.flatten().index_select(0, inverse).view(-1, top_k).to(ctx.weights_dtype)
        return _sum_copies(to_rows, inverse, top_k), to_gate_up, to_down, None, to_weights

    backward: Any = staticmethod(once_differentiable(_backward))


def mix_by_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, *, as_engine: bool = False
) -> Tensor:
    """See Ops.experts; on a CPU. Sums over a token's experts are float32 if x has 16 bits.

    `as_engine`: bitwise equal to the engine's forward pass; all float32. Raises RouteReplayError if `chosen`
    has an invalid expert.
    """
    if as_engine or training.multiplies(x, gate_up, down, weights):
        return cast(Tensor, _NativeExperts.apply(x, gate_up, down, chosen, weights, as_engine))
    return cast(Tensor, _Experts.apply(x, gate_up, down, chosen, weights))


def _places(sizes: list[int]) -> list[tuple[int, slice]]:
    """Each expert that any token chose, and its rows."""
    places: list[tuple[int, slice]] = []
    first = 0
    for expert, size in enumerate(sizes):
        if size:
            places.append((expert, slice(first, first + size)))
        first += size
    return places


def _sum_copies(rows: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """rows [T * k, width] in the experts' order -> sums by token [T, width], in the order of choice."""
    if rows.dtype == torch.float32:
        return F.embedding_bag(inverse.view(-1, top_k), rows, mode="sum")
    wide = torch.float32 if rows.dtype.itemsize == 2 else rows.dtype
    copies = rows.index_select(0, inverse).view(-1, top_k, rows.shape[-1])
    return copies.sum(1, dtype=wide).to(rows.dtype)
