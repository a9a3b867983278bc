"""Context parallelism: ranks divide the rows of a packed batch, so that one long sequence fits.

Every rank computes its rows through all layers; in attention, it uses the keys and values of all, gathered
layer by layer (Llama 3 herd of models, 2024). Long sequences are cut into 2C pieces, and rank c takes pieces
c and 2C-1-c, which balances early rows, which attend to few, and late ones, which attend to many. Short
sequences are not cut. Log-probabilities are gathered at the end: every rank computes the same loss, and
gradients of weights, from its own rows, are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.model import RouterStatistics
from etude.model.ops import Ops
from etude.model.permute import permute
from etude.model.rows import PackedRows
from etude.protocols import Routes
from etude.training.packing import sequence_cost
from etude.training.parallel.collectives import Group, gather_parts, gather_rows, group_rank, group_size
from etude.training.parallel.wrapped import WrappedOps

MIN_PIECE_TOKENS = 64
"""Minimum length of a piece: shorter sequences are not cut."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rows of one sequence."""

    start: int
    """First row of the sequence in the packed batch."""
    begin: int
    """First position in the sequence."""
    end: int
    """Position after the last."""


@lru_cache(maxsize=64)
def cut_pieces(
    lengths: tuple[int, ...], num_ranks: int, min_piece: int = MIN_PIECE_TOKENS
) -> list[list[Piece]]:
    """The pieces of each rank, in packed order. A deterministic function of the arguments."""
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    start = 0
    for length in lengths:
        if length >= 2 * num_ranks * min_piece:
            bounds = [round(i * length / (2 * num_ranks)) for i in range(2 * num_ranks + 1)]
            for rank in range(num_ranks):
                for i in (rank, 2 * num_ranks - 1 - rank):
                    pieces[rank].append(Piece(start, bounds[i], bounds[i + 1]))
        else:
            rank = costs.index(min(costs))
            pieces[rank].append(Piece(start, 0, length))
            costs[rank] += sequence_cost(length)
        start += length
    return pieces


def piece_rows(pieces: Sequence[Piece]) -> Tensor:
    """The packed rows of pieces, one after the other, [T]."""
    parts = [torch.arange(p.start + p.begin, p.start + p.end) for p in pieces]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


class ContextParallelOps(WrappedOps):
    """Ops whose `split_rows` divides a batch's rows among ranks; other operations are `inner`'s."""

    def __init__(self, inner: Ops, group: Group, num_moe_layers: int) -> None:
        """`num_moe_layers`: number of layers that route; the last computes the wanted rows only."""
        super().__init__(inner)
        self._group = group
        self._num_moe_layers = num_moe_layers

    @property
    def cuts_rows(self) -> bool:
        return True

    def split_rows(
        self,
        rows: PackedRows,
        lengths: Sequence[int],
        compute: Callable[[PackedRows], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """See Ops. Collective, also in the backward pass."""
        pieces = cut_pieces(tuple(lengths), group_size(self._group))
        split = _Split(pieces, rows.wanted, len(rows.tokens), self._group)
        statistics = None if rows.statistics is None else RouterStatistics([], [])
        own = replace(
            rows,
            tokens=rows.tokens[split.rows],
            positions=rows.positions[split.rows],
            attention=_SplitAttention(split),
            wanted=split.wanted,
            following=rows.following[split.predictions],
            routes=rows.routes and _SplitRoutes(rows.routes, split, self._num_moe_layers),
            statistics=statistics,
        )
        logprobs, entropy = compute(own)
        if rows.statistics is not None and statistics is not None:
            _add_up(statistics, rows.statistics, split)
        return split.join(logprobs), split.join(entropy)


class _Split:
    """The division of one batch's rows over ranks, and its inverse."""

    def __init__(self, pieces: list[list[Piece]], wanted: Tensor, num_rows: int, group: Group) -> None:
        """`wanted` [N]: the wanted rows of the batch, of all ranks."""
        self.group = group
        device = wanted.device
        by_rank = [piece_rows(own).to(device) for own in pieces]
        self.row_counts = [len(rows) for rows in by_rank]
        self.num_own_rows = self.row_counts[group_rank(group)]
        # A rank without rows, or without predictions, computes one whose result is discarded: the others need
        # it in every collective operation, also in the backward pass.
        self.pieces = pieces[group_rank(group)] or [Piece(0, 0, 1)]
        self.rows = piece_rows(self.pieces).to(device)
        """[T'] rows of the batch that this rank computes."""
        self.row_order = torch.cat(by_rank)
        self.row_places = _inverse(self.row_order)
        owner = torch.repeat_interleave(
            torch.arange(len(pieces), device=device), torch.tensor(self.row_counts, device=device)
        )[self.row_places[wanted]]
        order = owner.argsort(stable=True)
        self.prediction_counts = torch.bincount(owner, minlength=len(pieces)).tolist()
        self.prediction_order, self.prediction_places = order, _inverse(order)
        own = order.split(self.prediction_counts)[group_rank(group)]
        self.num_own = len(own)
        place = torch.zeros(num_rows, dtype=torch.int64, device=device)
        place[self.rows] = torch.arange(len(self.rows), device=device)
        self.predictions = own if len(own) else order[:1]
        """[N'] predictions that this rank makes."""
        self.wanted = place[wanted[own]] if len(own) else place[self.rows[:1]]
        """[N'] the index, among this rank's rows, of the row that each prediction is made from."""

    def join(self, values: Tensor) -> Tensor:
        """values [N'] -> [N], for a loss that every rank computes identically."""
        parts = gather_parts(values[: self.num_own], self.prediction_counts, self.group, shared=True)
        return permute(parts, self.prediction_places, self.prediction_order)

    def join_rows(self, values: Tensor) -> Tensor:
        """values [T', ...] -> [T, ...] in the batch's order, which each rank uses for its own rows."""
        own = values[: self.num_own_rows].contiguous()
        parts = gather_parts(own, self.row_counts, self.group, shared=False)
        return permute(parts, self.row_places, self.row_order)


class _SplitAttention:
    """Causal attention of this rank's rows to those of all. Implements Attention."""

    def __init__(self, split: _Split) -> None:
        self._split = split

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See Attention; the arguments have T' rows."""
        value_dim, dim = value.shape[-1], key.shape[-1]
        if value_dim < dim:  # fused kernels require equal widths
            value = F.pad(value, (0, dim - value_dim))
        keys, values = self._split.join_rows(torch.cat((key, value), dim=1)).chunk(2, dim=1)
        sizes = [piece.end - piece.begin for piece in self._split.pieces]
        parts = zip(self._split.pieces, query.split(sizes), strict=True)
        attended = [_attend_piece(piece, rows, keys, values) for piece, rows in parts]
        return torch.cat(attended)[..., :value_dim]


def _attend_piece(piece: Piece, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [n, heads, dim] of the piece; keys, values [T, kv_heads, dim] of the batch -> [n, heads, dim]."""
    seen = slice(piece.start, piece.start + piece.end)
    group = query.shape[1] // keys.shape[1]
    k, v = (x[seen].transpose(0, 1).repeat_interleave(group, dim=0)[None] for x in (keys, values))
    mask = None
    if piece.begin:
        places = torch.arange(piece.end, device=query.device)
        mask = places[None] <= places[piece.begin :, None]
    out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], k, v, mask, is_causal=mask is None)
    return out[0].transpose(0, 1)


class _SplitRoutes:
    """Selects routes with `inner` for the rows of all ranks, and returns this rank's. Implements Routes."""

    def __init__(self, inner: Routes[Tensor], split: _Split, num_moe_layers: int) -> None:
        self._inner = inner
        self._split = split
        self._last = num_moe_layers - 1

    def select(self, layer: int, scores: Tensor) -> Tensor:
        """See Routes; scores of this rank's rows, or, in the last layer, of those wanted."""
        split = self._split
        if layer == self._last:
            places, count, own = split.prediction_places, split.num_own, split.predictions
        else:
            places, count, own = split.row_places, split.num_own_rows, split.rows
        whole = gather_rows(scores[:count], split.group)[places]
        return self._inner.select(layer, whole)[own]


def _add_up(own: RouterStatistics, total: RouterStatistics, split: _Split) -> None:
    """Means over this rank's rows -> over all ranks'; each rank's own rows are differentiable."""
    size = group_size(split.group)
    last = len(own.shares) - 1
    for layer, (probability, share) in enumerate(zip(own.probabilities, own.shares, strict=True)):
        counts = split.prediction_counts if layer == last else split.row_counts
        part = counts[group_rank(split.group)] / sum(counts)
        rows = torch.stack((probability, share)) * part
        parts = gather_parts(rows, [2] * size, split.group, shared=True).view(size, 2, -1).sum(0)
        total.probabilities.append(parts[0])
        total.shares.append(parts[1].detach())


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
