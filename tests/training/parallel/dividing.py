"""Functions that tests run on tensor-parallel ranks: small models of each architecture, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch

from etude.config import OptimizerConfig
from etude.model import LanguageModel, PackedAttention, RouterStatistics, logprobs
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.training.optimizer import Optimizer
from etude.training.parallel import vocabulary
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.training.parallel.ranks import Ranks, SingleRank
from tests.model.builders import LATENT, fresh_routes, random_tokens, small_config
from tests.training.parallel.bodies import SHORT, Gradients, Plan

VOCAB_SIZE = 67
"""Does not divide evenly."""
CASES: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "qwen3", "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48},
    "biased": {"architecture": "qwen2", "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48},
    "mixture": {"num_heads": 4, "num_kv_heads": 4, "num_experts": 6, "tie_embeddings": False},
    "latent": {**LATENT, "tie_embeddings": False},
}


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be found with a model."""

    case: str
    plan: Plan
    dtype: str = "float32"
    replay: bool = False
    """With another model's routes, some of them missing, and with the load-balancing loss."""
    recompute: bool = False
    bounded: bool = False
    """Distributions are not kept for the backward pass, and rows are taken as few at a time as can be."""
    matrices: Literal["adamw", "muon"] = "adamw"
    distribution: bool = False
    """With a loss on whole distributions, of which every rank finds the same."""


@dataclass(frozen=True, slots=True)
class Found:
    """Of the whole batch and the whole model, on any number of ranks."""

    loss: float
    entropy: float
    gradients: Gradients
    norm: float
    weights: Gradients
    """After one step."""
    logits: np.ndarray


def divided_model(case: str, seed: int, dtype: str = "float32") -> LanguageModel:
    """One of the cases, with large weights, norms included."""
    model = LanguageModel(small_config(**CASES[case]), VOCAB_SIZE)
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model.cast(getattr(torch, dtype))


def find_all(ranks: MeshRanks, tasks: list[Task]) -> list[Found]:
    """What several ranks find together."""
    return [find(ranks, task) for task in tasks]


def find_alone(task: Task) -> Found:
    """What one process finds that takes the same micro-batches one after the other."""
    return find(SingleRank(), task)


def find(ranks: Ranks, task: Task) -> Found:
    """What `task` asks for."""
    with pytest.MonkeyPatch.context() as patch:
        if task.bounded:
            patch.setattr(vocabulary, "KEPT_LOGITS", 0)
            patch.setattr(logprobs, "BLOCK_LOGITS", 1)
        return _find(ranks, task)


def _find(ranks: Ranks, task: Task) -> Found:
    """Rank 0's weights are those that count."""
    model = divided_model(task.case, 0 if ranks.is_main else 1, task.dtype)
    if isinstance(ranks, MeshRanks):
        ranks.place(model)
    model.checkpoint_activations(task.recompute)
    config = OptimizerConfig(matrix_optimizer=task.matrices, warmup_steps=0, schedule="constant")
    optimizer = Optimizer(model, config, 10, ranks)
    loss, entropy = _backward(ranks, model, task)
    ranks.reduce_gradients(model)
    layout = ranks.layout(model)
    gradients = {
        name: layout.gather(name, gradient).float().numpy().copy()
        for name, gradient in layout.gradients().items()
        if gradient is not None
    }
    tokens = torch.arange(9)
    with torch.no_grad():
        logits = model.logits(model(tokens, tokens, PackedAttention([9]))).numpy().copy()
    layout.clear_gradients()
    _backward(ranks, model, task)
    norm = optimizer.step()
    weights = {n: layout.gather(n, p).float().numpy().copy() for n, p in layout.parts.items()}
    return Found(loss, entropy, gradients, norm, weights, logits)


def _backward(ranks: Ranks, model: LanguageModel, task: Task) -> tuple[float, float]:
    """Leaves gradients behind; returns the whole batch's loss and entropy."""
    plan = task.plan
    if isinstance(ranks, SingleRank):
        plan = [[batch for batches in task.plan for batch in batches]]
    sums = torch.zeros(2, dtype=torch.float64)
    for share in ranks.share(plan):
        tokens = [random_tokens(SHORT[index], index) for index in share.indices]
        batch = PackedSequences.pack(tokens)
        first = torch.zeros(len(batch.tokens), dtype=torch.bool)
        first[batch.starts] = True
        targets = (~first).nonzero().flatten()
        routes, statistics = None, None
        if task.replay:
            recorded = [fresh_routes(divided_model(task.case, 7), one) for one in tokens]
            recorded[0][3:5] = 255
            routes, statistics = batch.pack_rows(recorded), RouterStatistics([], [])
        chosen, entropy = packed_logprobs(
            model, batch, targets, temperature=1.3, routes=routes, statistics=statistics
        )
        loss = -chosen.sum() if statistics is None else 50.0 * statistics.balance_loss() - chosen.sum()
        if task.distribution:
            hidden = model(batch.tokens, batch.positions, batch.attention, wanted=targets[:9] - 1)
            loss = loss + model.logits(hidden).log_softmax(-1)[:, VOCAB_SIZE - 3].sum()
        (loss * share.weight).backward()
        sums += share.weight * torch.stack((loss.detach(), entropy.sum())).double()
    loss, entropy = ranks.all_reduce_(sums).tolist()
    return loss, entropy
