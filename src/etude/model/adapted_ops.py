"""Products with weights that have low-rank adapters, x weight + (x down) up, on top of any Ops.

The adapter is never merged into the weight: one of 16 bits would lose most of a small update to rounding.
Instead the product with the weight and that with the factors are added in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from etude.model.ops import Ops

Pair = tuple[Tensor, Tensor]
"""Factors left [..., m, rank] and right [..., rank, n] of a weight [..., m, n], both float32: the adapted
weight is weight + left right."""
Pairs = Mapping[int, Pair]
"""One adapter's pairs, by the `id` of the parameter that each adapts."""


class AdaptedOps:
    """`Ops` that add adapters to `inner`: the product with the weight is computed first, then each factor's.

    Rows may use different adapters; a row's result is independent of others if `inner` is batch-invariant.
    """

    def __init__(self, inner: Ops, adapters: Sequence[Pairs], rows: Sequence[Tensor | None]) -> None:
        """`rows`: per adapter, the rows [N] of a batch that use it; None: all of them."""
        self._inner = inner
        self._adapters = [(pairs, own) for pairs, own in zip(adapters, rows, strict=True)]

    def __getattr__(self, name: str) -> Any:
        """Operations without adapters are `inner`'s."""
        return getattr(self._inner, name)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        found = self._find(weight)
        if not found:
            return self._inner.linear(x, weight)
        return self._add(self._wide(x, weight), x, found).to(x.dtype)

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        found = self._find(weight)
        if not found:
            return self._inner.linear_add(residual, x, weight)
        if x.dtype == torch.float32:
            return self._add(self._inner.linear_add(residual, x, weight), x, found)
        return self._add(residual.float() + self._wide(x, weight), x, found).to(x.dtype)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops. `weight`: a parameter [heads, out, in], or one with its last dimensions transposed."""
        source = weight if weight._base is None else weight._base
        found = self._find(source)
        out = self._inner.per_head(x, weight)
        if found and weight.stride() != source.stride():
            found = [((right.mT, left.mT), rows) for (left, right), rows in found]
        for (left, right), rows in found:
            own = x if rows is None else x[rows]
            own = self._inner.per_head(self._inner.per_head(own.float(), right), left)
            own = out + own if rows is None else out[rows] + own
            out = own.to(x.dtype) if rows is None else out.index_copy(0, rows, own.to(x.dtype))
        return out

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Ops. Expert by expert: the product of an expert's rows with its weights and its factors."""
        opening, closing = self._by_expert(gate_up), self._by_expert(down)
        if not opening and not closing:
            return self._inner.experts(x, gate_up, down, chosen, weights)
        flat, top_k = chosen.flatten(), chosen.shape[1]
        order = flat.argsort(stable=True)
        source = order.div(top_k, rounding_mode="floor")
        mixed: list[Tensor] = []
        first = 0
        for expert, size in enumerate(torch.bincount(flat, minlength=len(gate_up)).tolist()):
            if not size:
                continue
            place = source[first : first + size]
            opened = self._of_expert(x.index_select(0, place), gate_up[expert], opening, expert, place)
            gate, up = opened.chunk(2, dim=-1)
            inner = self._inner.silu_gate(gate, up)
            mixed.append(self._of_expert(inner, down[expert], closing, expert, place))
            first += size
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        copies = torch.cat(mixed).index_select(0, back).view(len(x), top_k, -1).float()
        total = torch.zeros_like(copies[:, 0])
        for choice in range(top_k):  # one by one: the order of the native pass
            total = total + weights[:, choice : choice + 1] * copies[:, choice]
        return total.to(x.dtype)

    def _find(self, weight: Tensor) -> list[tuple[Pair, Tensor | None]]:
        """The pairs of `weight`, and the rows that use each."""
        return [(pairs[id(weight)], rows) for pairs, rows in self._adapters if id(weight) in pairs]

    def _by_expert(self, stack: Tensor) -> list[tuple[list[Pair], Tensor | None]]:
        """The pairs of each matrix of a stack [experts, in, out], transposed to weights [out, in]."""
        return [
            (list(zip(right.mT.unbind(0), left.mT.unbind(0), strict=True)), rows)
            for (left, right), rows in self._find(stack)
        ]

    def _of_expert(
        self,
        x: Tensor,
        weight: Tensor,
        adapters: list[tuple[list[Pair], Tensor | None]],
        expert: int,
        place: Tensor,
    ) -> Tensor:
        """x [N, in], rows `place` [N] of the batch, times weight [in, out] and its factors -> [N, out]."""
        found: list[tuple[Pair, Tensor | None]] = []
        for pairs, rows in adapters:
            own = None if rows is None else torch.isin(place, rows).nonzero().flatten()
            found.append((pairs[expert], own))
        if not found:
            return self._inner.linear(x, weight.t())
        return self._add(self._wide(x, weight.t()), x, found).to(x.dtype)

    def _wide(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product in float32."""
        inner = self._inner
        return inner.linear(x, weight) if x.dtype == torch.float32 else inner.logits(x, weight)

    def _add(self, out: Tensor, x: Tensor, found: list[tuple[Pair, Tensor | None]]) -> Tensor:
        """out [T, m] float32 + (x right^T) left^T, for the rows of each."""
        inner = self._inner
        for (left, right), rows in found:
            if rows is None:
                out = inner.linear_add(out, inner.linear(x.float(), right), left)
            elif len(rows):
                own = inner.linear(x[rows].float(), right)
                out = out.index_copy(0, rows, inner.linear_add(out[rows], own, left))
        return out
