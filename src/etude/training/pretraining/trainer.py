"""The trainer of all next-token training: mid-training, continued pre-training, SFT, layers that draft.

batches.draw() -> micro-batches, balanced over ranks -> loss -> backward; optimiser
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from etude.config import DraftsConfig, ModelConfig, NextTokenConfig
from etude.errors import CheckpointError
from etude.model import DraftLayers, LanguageModel, RouterStatistics
from etude.model.loading import read_architecture
from etude.model.scoring import PackedSequences, device_of, packed_logprobs, shared_tokens
from etude.training.checkpoints import WriteCheckpoint, load_stored, save_checkpoint
from etude.training.optimizer import OffendingBatches, Optimizer
from etude.training.packing import Packing, pack_sequences
from etude.training.parallel.ranks import Ranks, Share, SingleRank
from etude.training.pretraining.context import set_context, with_context_of
from etude.training.pretraining.documents import Batches, Document
from etude.training.pretraining.drafts import DraftLoss, hidden_and_logprobs
from etude.training.threads import add_gradients, count_batches, map_in_order, share_threads, splits_batches

_EVALUATED_TOKENS = 16_384
"""Tokens computed at once when no gradient is needed."""


@dataclass(frozen=True, slots=True)
class DraftTraining:
    """Draft layers that are trained together with a model, or alone."""

    layers: DraftLayers
    config: DraftsConfig


class NextTokenTrainer:
    """Trains a model in place on the documents drawn from `batches`."""

    def __init__(
        self,
        model: LanguageModel,
        batches: Batches | None,
        config: NextTokenConfig,
        drafts: DraftTraining | None = None,
        ranks: Ranks | None = None,
        offending: OffendingBatches | None = None,
    ) -> None:
        """`batches`: None if another process draws. `drafts`: draft layers to be trained. `ranks`: the
        processes that train the model together. `offending`: stores batches whose gradient is not finite."""
        self.model = model
        self.batches = batches
        self.drafts = drafts
        self._config = config
        self._ranks: Ranks = ranks or SingleRank()
        self._trainable = _trainable(model, drafts)
        self._splits_batches = splits_batches(model, self._ranks)
        self._optimizer = Optimizer(
            self._trainable, config.optimizer, config.num_steps, self._ranks, offending
        )

    @property
    def num_steps_taken(self) -> int:
        """Optimiser steps, including those skipped for a gradient that was not finite."""
        return self._optimizer.num_taken

    @property
    def finished(self) -> bool:
        """Whether all steps are taken, or no documents are left."""
        exhausted = self.batches is not None and self.batches.exhausted
        return exhausted or self.num_steps_taken >= self._config.num_steps

    def step(self, documents: Sequence[Document] | None = None) -> Mapping[str, float]:
        """One optimiser step on `documents`, or newly drawn ones; returns metrics (losses in nats per token).

        Losses are weighted means over the whole step, so micro-batches change only rounding.
        """
        with share_threads(split=self._splits_batches) as num_threads, _multiply_in(self._config.products):
            return self._step(documents, num_threads)

    def _step(self, given: Sequence[Document] | None, num_threads: int) -> Mapping[str, float]:
        began = time.perf_counter()
        documents = self._draw() if given is None else given
        lengths = [len(document.tokens) for document in documents]
        plan = self._pack(documents)
        totals = [_total_weight([documents[i] for i in batch]) for share in plan for batch in share if batch]
        total = torch.stack(totals).sum() if len(totals) > 1 else totals[0]
        sums = torch.zeros(5, dtype=torch.float64)
        draft_sums = torch.zeros(0, dtype=torch.float64)

        def compute(share: Share) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            chosen = [documents[i] for i in share.indices]
            part = sum(len(document.tokens) for document in chosen) / sum(lengths)
            objective, found, drafted = self._objective(chosen, total, part)
            weight = share.weight
            return (objective * weight if weight != 1.0 else objective), (weight * found, weight * drafted)

        for found, drafted in add_gradients(self._trainable, compute, self._ranks.share(plan), num_threads):
            sums += found
            draft_sums = drafted + (draft_sums if len(draft_sums) else 0.0)
        sums = self._ranks.all_reduce_(sums)
        norm = self._optimizer.step(lambda: _describe(documents), num_threads)
        loss, agent_sum, agent_count, balance, num_tokens = sums.tolist()
        figures = {
            "loss": loss,
            "agent_loss": agent_sum / agent_count if agent_count else 0.0,
            "balance": balance,
            "grad_norm": norm,
            "skipped": float(self._optimizer.num_skipped),
            "tokens": num_tokens,
            **({} if self.batches is None else self.batches.figures()),
        }
        for depth, value in enumerate(self._ranks.all_reduce_(draft_sums).tolist(), start=1):
            figures[f"draft_loss_{depth}"] = value
        return {**figures, "step_s": time.perf_counter() - began}

    def whole_model(self) -> LanguageModel:
        """See RlTrainer.whole_model."""
        return self._ranks.whole_model(self.model)

    def evaluate(self, documents: Sequence[Document]) -> float:
        """See `evaluate_loss`."""
        return evaluate_loss(self.model, documents, ranks=self._ranks)

    def set_context(self, config: ModelConfig) -> None:
        """See `context.set_context`."""
        set_context(self.model, config, self.drafts and self.drafts.layers)

    def save(
        self,
        directory: Path,
        extra: Mapping[str, Any] | None = None,
        write: WriteCheckpoint = save_checkpoint,
    ) -> None:
        """Writes everything that `restore` needs, and `extra`: plain values of the caller's, with several
        ranks the first one's. `write`: writes the checkpoint, perhaps while training continues."""
        state: dict[str, Any] = {**(extra or {}), "trainer": self.state_dict()}
        if self.drafts is not None:
            state["drafts"] = self.drafts.layers.state_dict()
        write(directory, self._ranks.stored(self.model), state)

    def restore(self, directory: Path) -> None:
        """Restores a checkpoint of `save`, including the model's window. Raises CheckpointError."""
        before, config = self.model.config, read_architecture(directory)
        if config is not None:
            self.set_context(with_context_of(before, config))
        try:
            model, state = load_stored(
                directory, self._ranks.stored(self.model), {"trainer": self.state_dict()}
            )
        except CheckpointError:
            if config is not None:
                self.set_context(before)
            raise
        if model is None or state is None or "trainer" not in state:
            raise CheckpointError("has no training state", field="checkpoint", received=str(directory))
        self.load_state_dict(state["trainer"])
        self._ranks.load_weights(self.model, model.state_dict())
        if self.drafts is not None:
            self.drafts.layers.load_state_dict(state["drafts"])

    def state_dict(self) -> dict[str, Any]:
        """The state without the weights, from which `load_state_dict` resumes exactly."""
        batches = {} if self.batches is None else self.batches.state_dict()
        return {"optimizer": self._optimizer.state_dict(), "batches": batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`. Raises CheckpointError if it belongs to another training."""
        if self.batches is not None:
            self.batches.load_state_dict(state["batches"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _draw(self) -> Sequence[Document]:
        assert self.batches is not None, "otherwise each step is given its documents"
        return self.batches.draw()

    def _pack(self, documents: Sequence[Document]) -> Packing:
        lengths = [len(document.tokens) for document in documents]
        max_tokens = self._config.micro_batch_tokens or sum(lengths)
        shared = 0 if self.drafts else shared_tokens(self.model, [document.tokens for document in documents])
        least = count_batches(len(lengths), sum(lengths), shared) if self._splits_batches else 1
        return pack_sequences(
            lengths, max_tokens, self._ranks.world_size, least_batches=least, shared_tokens=shared
        )

    def _objective(
        self, documents: Sequence[Document], total: Tensor, part: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One micro-batch's contributions to the step's objective; to the loss, the sum and number of agent
        losses, the balance loss and the number of tokens, [5]; and to each draft layer's loss."""
        packed = PackedSequences.pack([document.tokens for document in documents], device_of(self.model))
        weights = packed.pack_rows([document.weights for document in documents])
        agent = packed.pack_rows([document.agent for document in documents])
        weights[packed.starts] = 0.0
        targets = (weights > 0).nonzero().flatten()
        chosen = weights[targets]
        total = total.to(chosen.device)
        statistics = RouterStatistics([], []) if self._config.balance_weight > 0 else None
        if self.drafts is None:
            logprobs, _ = packed_logprobs(self.model, packed, targets, statistics=statistics)
            drafted = logprobs.new_zeros(0)
        else:
            frozen = self.drafts.config.only
            hidden, logprobs = hidden_and_logprobs(self.model, packed, targets, statistics, frozen=frozen)
            drafted = DraftLoss(self.model, self.drafts.layers).per_depth(packed, hidden, weights, total)
        loss = -(logprobs * chosen).sum() / total
        balance = loss.new_zeros(()) if statistics is None else part * statistics.balance_loss()
        objective = loss + self._config.balance_weight * balance
        if self.drafts is not None:
            objective = self.drafts.config.weight * drafted.mean() + (
                0.0 if self.drafts.config.only else objective
            )
        agent_losses = -logprobs.detach()[agent[targets]].double()
        counts = (agent_losses.sum(), len(agent_losses), float(balance.detach()), len(packed.tokens))
        found = torch.tensor([float(loss.detach()), *map(float, counts)], dtype=torch.float64)
        return objective, found, drafted.detach().double().cpu()


@contextlib.contextmanager
def _multiply_in(number_format: Literal["float32", "bfloat16"]) -> Iterator[None]:
    """Within it, factors of float32 matrix products are rounded to this format."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if number_format == "bfloat16" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def evaluate_loss(model: LanguageModel, documents: Sequence[Document], ranks: Ranks | None = None) -> float:
    """Mean loss in nats per agent token; NaN if there are none.

    With several `ranks`, all call it together and each computes its share.
    """
    ranks = ranks or SingleRank()
    documents = [document for document in documents if document.agent[1:].any()]
    lengths = [len(document.tokens) for document in documents]
    shares = ranks.share(pack_sequences(lengths, _EVALUATED_TOKENS, ranks.world_size))

    @torch.no_grad()  # each thread has a mode of its own
    def compute(share: Share) -> Tensor:
        chosen = [documents[i] for i in share.indices]
        batch = PackedSequences.pack([document.tokens for document in chosen], device_of(model))
        agent = batch.pack_rows([document.agent for document in chosen])
        agent[batch.starts] = False
        targets = agent.nonzero().flatten()
        logprobs, _ = packed_logprobs(model, batch, targets)
        return share.weight * torch.tensor(
            [-float(logprobs.double().sum()), len(targets)], dtype=torch.float64
        )

    with share_threads(split=splits_batches(model, ranks)) as num_threads:
        sums = sum(map_in_order(compute, shares, num_threads), torch.zeros(2, dtype=torch.float64))
    total, count = ranks.all_reduce_(sums).tolist()
    return total / count if count else float("nan")


def _trainable(model: LanguageModel, drafts: DraftTraining | None) -> nn.Module:
    """The module whose parameters the optimiser updates."""
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
