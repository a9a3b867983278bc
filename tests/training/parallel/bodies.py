"""What tests let every rank do. Plain data in, plain data out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.model import LanguageModel, RouterStatistics
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.training.parallel.ranks import Share
from etude.training.parallel.sharding import release
from tests.model.builders import fresh_routes, random_tokens, small_model

LENGTHS = (33, 21, 40, 12, 25, 18, 29, 16)
"""Of the sequences that tests train on."""


def loss_of(model: LanguageModel, indices: tuple[int, ...], replay: bool = False) -> Tensor:
    """Summed negative log-likelihood of some of the sequences; `replay`: with another model's routes."""
    tokens = [random_tokens(LENGTHS[index], index) for index in indices]
    batch = PackedSequences.pack(tokens)
    first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    first[batch.starts] = True
    routes = None
    if replay:
        other = small_model(7)
        routes = batch.pack_rows([fresh_routes(other, one) for one in tokens])
    targets = (~first).nonzero().flatten()
    logprobs, _ = packed_logprobs(model, batch, targets, routes=routes)
    return -logprobs.sum()


def gradients_of(model: LanguageModel, shares: list[Share], replay: bool = False) -> float:
    """Leaves gradients behind; returns the loss."""
    total = 0.0
    for share in shares:
        loss = loss_of(model, share.indices, replay) * share.weight
        loss.backward()
        total += float(loss.detach())
    return total


def plan_of(num_ranks: int, per_batch: int = 1) -> list[list[list[int]]]:
    """The sequences dealt out in turn, `per_batch` in a micro-batch."""
    batches = [list(range(i, min(i + per_batch, len(LENGTHS)))) for i in range(0, len(LENGTHS), per_batch)]
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def losses_and_gradients(
    ranks: MeshRanks, plan: list[list[list[int]]], replay: bool = False
) -> tuple[float, dict[str, np.ndarray]]:
    """The whole batch's loss and gradients, as every rank of the mesh finds them together."""
    model = small_model(0 if ranks.is_main else 1)  # rank 0's weights are those that count
    ranks.place(model)
    loss = torch.tensor([gradients_of(model, ranks.share(plan), replay)], dtype=torch.float64)
    ranks.reduce_gradients(model)
    ranks.all_reduce_(loss)
    layout = ranks.layout(model)
    whole = {
        name: layout.gather(name, gradient).numpy().copy()
        for name, gradient in layout.gradients().items()
        if gradient is not None
    }
    return float(loss), whole


def whole_weights(ranks: MeshRanks) -> tuple[bool, bool, list[np.ndarray]]:
    """Places a model, collects it, loads others into it; scores before, and whether all was as it should."""
    model, plain, other = small_model(0), small_model(0), small_model(5)
    ranks.place(model)
    scores = score_sequences(model, [random_tokens(20, 3)])
    release(model)
    collected = ranks.whole_model(model)
    same = all(torch.equal(p, q) for p, q in zip(collected.parameters(), plain.parameters(), strict=True))
    ranks.load_whole(model, dict(other.named_parameters()))
    loaded = ranks.whole_model(model)
    replaced = all(torch.equal(p, q) for p, q in zip(loaded.parameters(), other.parameters(), strict=True))
    return same, replaced, [s.copy() for s in scores]


def balance(ranks: MeshRanks) -> Any:
    """Unused parts of a statistics pass stay differentiable on every rank."""
    model = small_model(0)
    ranks.place(model)
    batch = PackedSequences.pack([random_tokens(20, 3)])
    statistics = RouterStatistics([], [])
    packed_logprobs(model, batch, torch.arange(1, 20), statistics=statistics)
    return float(statistics.balance_loss())
