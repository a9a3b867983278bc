"""The trainer of all next-token training: mid-training, continued pre-training, SFT, layers that draft.

batches.draw() -> micro-batches, balanced over ranks -> loss -> backward; optimiser
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from etude.config import DraftsConfig, NextTokenConfig
from etude.model import DraftLayers, LanguageModel, RouterStatistics
from etude.model.scoring import PackedSequences, device_of, packed_logprobs
from etude.training.optimizer import OffendingBatches, Optimizer
from etude.training.packing import pack_sequences
from etude.training.parallel.ranks import Ranks, SingleRank
from etude.training.pretraining.documents import Batches, Document
from etude.training.pretraining.drafts import DraftLoss, hidden_and_logprobs

EVALUATED_TOKENS = 16_384
"""Tokens computed at once where no gradient is wanted."""


@dataclass(frozen=True, slots=True)
class DraftTraining:
    """Draft layers that learn along with a model, or alone."""

    layers: DraftLayers
    config: DraftsConfig


class NextTokenTrainer:
    """Trains a model in place on what `batches` draws."""

    def __init__(
        self,
        model: LanguageModel,
        batches: Batches,
        config: NextTokenConfig,
        drafts: DraftTraining | None = None,
        ranks: Ranks | None = None,
        offending: OffendingBatches | None = None,
    ) -> None:
        """`drafts`: draft layers to be trained. `ranks`: who trains the model along with this process.
        `offending`: where batches go whose gradient is not finite."""
        self.model = model
        self.batches = batches
        self.drafts = drafts
        self._config = config
        self._ranks: Ranks = ranks or SingleRank()
        learning = _learning(model, drafts)
        self._optimizer = Optimizer(learning, config.optimizer, config.num_steps, self._ranks, offending)

    @property
    def num_steps_taken(self) -> int:
        """Optimiser steps, those skipped for a gradient that was not finite included."""
        return self._optimizer.num_taken

    @property
    def finished(self) -> bool:
        """Whether all steps are taken, or nothing is left to train on."""
        return self.num_steps_taken >= self._config.num_steps or self.batches.exhausted

    def step(self) -> Mapping[str, float]:
        """One optimiser step; returns metrics (losses in nats per token).

        Losses are weighted means over the whole step, so micro-batches change rounding and nothing else.
        """
        began = time.perf_counter()
        documents = self.batches.draw()
        lengths = [len(document.tokens) for document in documents]
        max_tokens = self._config.micro_batch_tokens or sum(lengths)
        plan = pack_sequences(lengths, max_tokens, self._ranks.world_size)
        totals = [_total_weight([documents[i] for i in batch]) for share in plan for batch in share if batch]
        total = torch.stack(totals).sum() if len(totals) > 1 else totals[0]
        sums = torch.zeros(5, dtype=torch.float64)
        draft_sums = torch.zeros(0, dtype=torch.float64)
        for share in self._ranks.share(plan):
            chosen = [documents[i] for i in share.indices]
            part = sum(len(document.tokens) for document in chosen) / sum(lengths)
            found, drafted = self._add_gradient(chosen, total, share.weight, part)
            sums += share.weight * found
            draft_sums = share.weight * drafted + (draft_sums if len(draft_sums) else 0.0)
        sums = self._ranks.all_reduce_(sums)
        norm = self._optimizer.step(lambda: _describe(documents))
        loss, agent_sum, agent_count, balance, num_tokens = sums.tolist()
        figures = {
            "loss": loss,
            "agent_loss": agent_sum / agent_count if agent_count else 0.0,
            "balance": balance,
            "grad_norm": norm,
            "skipped": float(self._optimizer.num_skipped),
            "tokens": num_tokens,
            **self.batches.figures(),
        }
        for depth, value in enumerate(self._ranks.all_reduce_(draft_sums).tolist(), start=1):
            figures[f"draft_loss_{depth}"] = value
        return {**figures, "step_s": time.perf_counter() - began}

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on exactly; the weights are not part of it."""
        return {"optimizer": self._optimizer.state_dict(), "batches": self.batches.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was taken. Raises CheckpointError where it is another training's."""
        self.batches.load_state_dict(state["batches"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _add_gradient(
        self, documents: Sequence[Document], total: Tensor, weight: float, part: float
    ) -> tuple[Tensor, Tensor]:
        """Adds one micro-batch's gradient. Returns its share of the step's loss, the sum and number of the
        agent's losses, its share of the balance and its tokens, [5]; and of each draft layer's loss."""
        packed = PackedSequences.pack([document.tokens for document in documents], device_of(self.model))
        weights = packed.pack_rows([document.weights for document in documents])
        agent = packed.pack_rows([document.agent for document in documents])
        weights[packed.starts] = 0.0
        targets = (weights > 0).nonzero().flatten()
        chosen = weights[targets]
        total = total.to(chosen.device)
        statistics = RouterStatistics([], [])
        if self.drafts is None:
            logprobs, _ = packed_logprobs(self.model, packed, targets, statistics=statistics)
            drafted = logprobs.new_zeros(0)
        else:
            frozen = self.drafts.config.only
            hidden, logprobs = hidden_and_logprobs(self.model, packed, targets, statistics, frozen=frozen)
            drafted = DraftLoss(self.model, self.drafts.layers).per_depth(packed, hidden, weights, total)
        loss = -(logprobs * chosen).sum() / total
        balance = part * statistics.balance_loss()
        objective = loss + self._config.balance_weight * balance
        if self.drafts is not None:
            objective = self.drafts.config.weight * drafted.mean() + (
                0.0 if self.drafts.config.only else objective
            )
        (objective * weight if weight != 1.0 else objective).backward()
        agent_losses = -logprobs.detach()[agent[targets]].double()
        counts = (agent_losses.sum(), len(agent_losses), float(balance.detach()), len(packed.tokens))
        found = torch.tensor([float(loss.detach()), *map(float, counts)], dtype=torch.float64)
        return found, drafted.detach().double().cpu()


@torch.no_grad()
def evaluate_loss(
    model: LanguageModel, documents: Sequence[Document], max_tokens: int = EVALUATED_TOKENS
) -> float:
    """Mean loss in nats per agent token, computed up to `max_tokens` at once; NaN where there are none."""
    lengths = [len(document.tokens) for document in documents]
    total, count = 0.0, 0
    for indices in pack_sequences(lengths, max_tokens)[0]:
        chosen = [documents[i] for i in indices]
        batch = PackedSequences.pack([document.tokens for document in chosen], device_of(model))
        agent = batch.pack_rows([document.agent for document in chosen])
        agent[batch.starts] = False
        targets = agent.nonzero().flatten()
        if len(targets):
            logprobs, _ = packed_logprobs(model, batch, targets)
            total -= float(logprobs.double().sum())
            count += len(targets)
    return total / count if count else float("nan")


def _learning(model: LanguageModel, drafts: DraftTraining | None) -> nn.Module:
    """What the optimiser updates."""
    if drafts is None:
        return model
    if drafts.config.only:
        model.requires_grad_(requires_grad=False)
        return drafts.layers
    return nn.ModuleDict({"model": model, "drafts": drafts.layers})


def _total_weight(documents: Sequence[Document]) -> Tensor:
    """Sum of the loss weights in the order in which the micro-batch is packed."""
    ordered = sorted(documents, key=lambda document: -len(document.tokens))
    weights = torch.cat([torch.from_numpy(document.weights[1:]) for document in ordered])
    return weights[weights > 0].sum()


def _describe(documents: Sequence[Document]) -> dict[str, Any]:
    return {
        "documents": [
            {"tokens": torch.from_numpy(document.tokens), "weights": torch.from_numpy(document.weights)}
            for document in documents
        ]
    }
