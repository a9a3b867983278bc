"""Expert parallelism: each rank has some of a layer's experts, and tokens are sent to those they chose.

    copies of this rank's rows, by expert ──all-to-all──> rows for this rank's experts, from every rank
                                                              │ the ordinary experts
    weighted sum per row, in the order of choice <──all-to-all┘

A rank routes its own tokens, natively or by replay, before any are sent, exactly as it would without other
ranks. In the backward pass, gradients of rows are sent back the same way; an expert's gradient is complete on
the rank that has it. GShard (Lepikhin et al. 2020) without capacities: no token is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.model.ops import Ops
from etude.model.permute import dispatch, permute
from etude.training.parallel.collectives import Group, exchange, exchange_counts, group_size
from etude.training.parallel.wrapped import WrappedOps


class ExpertParallelOps(WrappedOps):
    """Ops whose `experts` uses this rank's experts only; other operations are `inner`'s."""

    def __init__(self, inner: Ops, group: Group, num_experts: int) -> None:
        """`num_experts`: of a whole layer; each rank has a contiguous run of them, in the order of ranks."""
        super().__init__(inner)
        self._group = group
        self._num_experts = num_experts
        self._num_local = num_experts // group_size(group)

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Ops; gate_up and down are of this rank's experts, `chosen` counts all. Collective."""
        flat, top_k = chosen.flatten(), chosen.shape[1]
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        counts = torch.bincount(flat, minlength=self._num_experts).view(-1, self._num_local)
        arriving = exchange_counts(counts, self._group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = exchange(dispatch(x, order, inverse, top_k), sent, received, self._group)
        mixed = exchange(self._mix(rows, gate_up, down, arriving), received, sent, self._group)
        mixed = permute(mixed, inverse, order).view(len(x), top_k, -1)
        return torch.bmm(weights.to(x.dtype).unsqueeze(1), mixed).squeeze(1)

    def _mix(self, rows: Tensor, gate_up: Tensor, down: Tensor, arriving: Tensor) -> Tensor:
        """Applies the local experts to rows [R, width], sorted by source rank, then by expert; `arriving`
        [ranks, local experts]: their counts."""
        if not len(
            rows
        ):  # the weights' gradients must be zeros, not missing: other ranks sum theirs with them
            return rows + 0.0 * (gate_up.sum() + down.sum())
        expert = torch.arange(self._num_local, device=rows.device).repeat(len(arriving))
        expert = expert.repeat_interleave(arriving.flatten()).unsqueeze(1)
        ones = torch.ones(expert.shape, dtype=torch.float32, device=rows.device)
        return self.inner.experts(rows, gate_up, down, expert, ones)
