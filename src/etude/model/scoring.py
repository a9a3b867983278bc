"""Log-probabilities of given tokens, computed the same way for scoring, parity and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.model.attention import PackedAttention
from etude.model.feed_forward import RouterStatistics
from etude.model.language_model import LanguageModel
from etude.model.prefixes import count_shared_tokens, find_shared_rows, share_prefixes
from etude.model.routes import ReplayedRoutes
from etude.model.rows import PackedRows
from etude.protocols import Routes


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's weights, on which its inputs must be too."""
    return next(model.parameters()).device


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Concatenated sequences, longest first; T tokens in total."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, from 0 in each sequence."""
    attention: PackedAttention
    order: list[int]
    """`order[i]`: index, among the given sequences, of the i-th packed one."""
    starts: list[int]
    """`starts[i]`: first row of the i-th packed sequence."""
    sequences: list[NDArray[np.int32]]
    """The sequences in packed order."""

    @staticmethod
    def pack(
        sequences: Sequence[NDArray[np.int32]], device: torch.device | str | None = None
    ) -> PackedSequences:
        """Packs sequences of at least one token each; all tensors lie on `device`, by default the CPU."""
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        lengths = [len(sequences[i]) for i in order]
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).tolist()
        tokens = np.concatenate([sequences[i] for i in order]).astype(np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        return PackedSequences(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(positions).to(device),
            PackedAttention(lengths, device=device),
            order,
            starts,
            [sequences[i] for i in order],
        )

    def pack_rows(self, rows: Sequence[NDArray[np.generic]]) -> Tensor:
        """Values of each given sequence, [T_i, ...] -> [T, ...] in packed order on the same device."""
        return torch.from_numpy(np.concatenate([rows[i] for i in self.order])).to(self.tokens.device)

    def unpack(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """[T] in packed order -> one array per given sequence, in the given order."""
        ends = [*self.starts[1:], len(values)]
        result: list[NDArray[np.float32]] = [values[:0]] * len(self.order)
        for place, i in enumerate(self.order):
            result[i] = values[self.starts[place] : ends[place]]
        return result


def packed_logprobs(
    model: LanguageModel,
    batch: PackedSequences,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    routes: Tensor | Routes[Tensor] | None = None,
    statistics: RouterStatistics | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability [N] and entropy [N], which is detached, at each of `targets` [N].

    `targets` are rows of the packed batch whose token is to be scored given those before it: never the
    first row of a sequence. `routes`: a tensor [T, layers, top_k] of experts to replay, or Routes, which in
    the last layer select for the rows `targets` - 1 only. Differentiable. Common prefixes of sequences are
    computed once if the model is dense (see `share_prefixes`).
    """
    wanted = targets - 1
    replay = ReplayedRoutes(routes, wanted) if isinstance(routes, Tensor) else routes
    packed, following = batch.attention, batch.tokens[targets]
    shared = find_shared_rows(batch.sequences) if _shares_prefixes(model) else None
    if shared is not None:
        packed = PackedAttention(packed.lengths, device=batch.tokens.device, unused=shared.repeated)
    attention = model.ops.packed_attention(packed)
    rows = PackedRows(batch.tokens, batch.positions, attention, wanted, following, replay, statistics)
    if shared is not None:
        rows = share_prefixes(rows, shared)
    return model.ops.split_rows(
        rows, batch.attention.lengths, lambda own: _row_logprobs(model, own, temperature)
    )


def shared_tokens(model: nn.Module, sequences: Sequence[NDArray[np.int32]]) -> int:
    """Length of the sequences' common prefix that each micro-batch of them computes once."""
    return count_shared_tokens(sequences) if _shares_prefixes(model) else 0


def _shares_prefixes(model: nn.Module) -> bool:
    """Whether rows with equal prefixes may be shared: in a mixture of experts, each sequence may have chosen
    other experts. Latent attention, transformers' models and context parallelism need all rows."""
    if not isinstance(model, LanguageModel):
        return False
    return not (model.num_experts or model.config.is_latent or model.ops.cuts_rows)


def _row_logprobs(model: LanguageModel, rows: PackedRows, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of the tokens that follow the wanted rows, and entropy [N] there."""
    hidden = model(
        rows.tokens, rows.positions, rows.attention, rows.routes, rows.statistics, wanted=rows.wanted
    )
    return model.logprobs(hidden, rows.following, temperature)


@torch.no_grad()
def score_sequences(
    model: LanguageModel,
    sequences: Sequence[NDArray[np.int32]],
    *,
    temperature: float = 1.0,
    routes: Sequence[NDArray[np.uint8]] | None = None,
) -> list[NDArray[np.float32]]:
    """Log-probabilities [T_i] of each sequence; entry 0 is 0."""
    batch = PackedSequences.pack(sequences, device_of(model))
    first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    first[batch.starts] = True
    targets = (~first).nonzero().flatten().to(batch.tokens.device)
    packed_routes = batch.pack_rows(routes) if routes is not None else None
    scored, _ = packed_logprobs(model, batch, targets, temperature=temperature, routes=packed_routes)
    values = scored.new_zeros(len(batch.tokens))
    values[targets] = scored
    return batch.unpack(values.cpu().numpy())
