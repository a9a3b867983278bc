"""Sums and exchanges between ranks, in a fixed order.

A library's own all-reduce adds in an order that depends on the number of ranks, the tensor's size and the
algorithm it picks. Here every element is summed in the order of ranks, on one rank, and sent to the others:
the traffic is that of a ring, and the result is bitwise that of one process that adds the same terms one
after the other. A group may be `None`: this process alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""Ranks that communicate with each other; None is this process alone."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# The second is its name before PyTorch 2.13.

BUCKET_BYTES = 32 << 20
"""Approximate size of the buffers in which gradients are summed."""


def group_size(group: Group) -> int:
    """Number of ranks in a group."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """This process' rank in a group."""
    return 0 if group is None else group.rank()


def sum_in_order(tensor: Tensor, group: Group) -> None:
    """All-reduces `tensor` in place: its sum over the group, added in the order of ranks."""
    if group_size(group) > 1:
        tensor.copy_(summed_in_order(tensor, group))


def summed_in_order(tensor: Tensor, group: Group) -> Tensor:
    """The sum over a group of several ranks, added in the order of ranks, on every rank. No gradient."""
    flat = tensor.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % group_size(group)))
    part = torch.empty(len(padded) // group_size(group), dtype=flat.dtype, device=flat.device)
    _reduce_scatter(part, padded, group)
    total = torch.empty_like(padded)
    _all_gather(total, part, group=group)
    return total[: len(flat)].view(tensor.shape)


def sum_all_in_order(tensors: Sequence[Tensor], group: Group) -> None:
    """`sum_in_order` for many tensors, a bucket at a time."""
    if group_size(group) == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sum_in_order(flat, group)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one type, up to BUCKET_BYTES together (or one tensor)."""
    for _, same_type in groupby(tensors, key=lambda tensor: tensor.dtype):
        bucket: list[Tensor] = []
        for tensor in same_type:
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> None:
    """Sums `whole` [size * n] over ranks, in their order, into this rank's `part` [n]."""
    terms = torch.empty_like(whole)
    dist.all_to_all_single(terms, whole, group=group)
    first, *rest = terms.view(group_size(group), -1)
    part.copy_(first)
    for term in rest:
        part.add_(term)


class OrderedReduceScatter:
    """Reduce-scatter of gradients for FSDP2, summing in the order of ranks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Always sums, also if `op` is the mean: losses are already divided by the whole batch's count."""
        _reduce_scatter(output_tensor, input_tensor, group)


def gather_rows(rows: Tensor, group: Group) -> Tensor:
    """rows [N, ...], where N may differ between ranks -> all of them, in the order of ranks. No gradient."""
    if group_size(group) == 1:
        return rows
    sizes = torch.tensor([len(rows)], device=rows.device)
    counts = torch.empty(group_size(group), dtype=sizes.dtype, device=rows.device)
    _all_gather(counts, sizes, group=group)
    return _gather_ragged(rows, counts.tolist(), group)


def _gather_ragged(rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """`gather_rows` for row counts that are known to every rank."""
    longest = max(counts)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    everyone = rows.new_empty((len(counts) * longest, *rows.shape[1:]))
    _all_gather(everyone, padded, group=group)
    blocks = everyone.split(longest) if longest else [everyone] * len(counts)
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the backward pass returns their gradients to the senders."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """All-to-all. rows [sum(sent), ...]: the first `sent[0]` go to rank 0, and so on -> [sum(received), ...],
    those of rank 0 first. Differentiable; collective, also in the backward pass."""
    return cast(Tensor, _Exchange.apply(rows, sent, received, group))


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """counts [ranks, n]: row r goes to rank r -> [ranks, n], row r came from rank r."""
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts.contiguous(), group=group)
    return arrived


class _GatherParts(torch.autograd.Function):
    """All-gather of rows; backward, a rank's gradient is the sum over the ranks that used its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: Group, shared: bool) -> Tensor:
        ctx.counts, ctx.group, ctx.shared = counts, group, shared
        return _gather_ragged(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        counts, group, (gradient,) = ctx.counts, ctx.group, gradients
        parts = gradient.split(counts)
        own = parts[group_rank(group)]
        if ctx.shared:
            return own, None, None, None
        sent, received = list(counts), [len(own)] * group_size(group)
        terms = _exchange_rows(gradient, sent, received, group).view(len(counts), *own.shape)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total, None, None, None


def gather_parts(rows: Tensor, counts: list[int], group: Group, *, shared: bool) -> Tensor:
    """All-gather. rows [counts[rank], ...] -> those of all ranks [sum(counts), ...]. Differentiable.

    `shared`: every rank computes the same from the result, so a part's gradient is the one on its own rank.
    Otherwise ranks compute different things, and a part's gradient is the sum over all of them.
    """
    return cast(Tensor, _GatherParts.apply(rows, counts, group, shared))
