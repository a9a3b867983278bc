"""The RL step: policy gradients on graded groups, exact about what was sampled."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.algorithms import LossTerms, cispo, clipped_surrogate, k3
from etude.config import RlConfig
from etude.errors import CheckpointError
from etude.model import Qwen3Moe, RouterStatistics
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.records import Group, PolicyVersion, Scores, WeightManifest
from etude.training.batches import (
    RouteFetcher,
    TrainingSequence,
    micro_batches,
    split_updates,
    training_sequences,
)
from etude.training.checkpoint import load_checkpoint, save_checkpoint
from etude.training.optimizer import Optimizer
from etude.weights import MemoryWeights

MICRO_BATCH_TOKENS = 8192


class RlTrainer:
    """Implements the Trainer protocol for one process."""

    def __init__(
        self,
        model: Qwen3Moe,
        config: RlConfig,
        lineage: str,
        weights: MemoryWeights,
        fetch_routes: RouteFetcher,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    ) -> None:
        """`lineage` names the run; version 0 is the model as given. `micro_batch_tokens`: most tokens in one
        forward pass (or one sequence); it decides memory and speed, not the update."""
        self.model = model
        self._config = config
        self._weights = weights
        self._fetch_routes = fetch_routes
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = Optimizer(model, config.optimizer, config.num_steps * config.updates_per_step)
        self._version = PolicyVersion(lineage, 0)
        self._reference = _frozen_copy(model) if config.loss.kl_weight > 0 else None

    @property
    def version(self) -> PolicyVersion:
        """See Trainer.version."""
        return self._version

    def step(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """See Trainer.step. Metrics: means over trained tokens, times in seconds."""
        began = time.perf_counter()
        grouped = training_sequences(groups, self._config, self._fetch_routes)
        meter = _Meter()
        for update in split_updates(grouped, self._config.updates_per_step):
            self._update(update, meter)
            meter.same_version = False
        self._version = PolicyVersion(self._version.lineage, self._version.step + 1)
        return meter.summary(time.perf_counter() - began, self._optimizer.num_skipped)

    def publish(self) -> WeightManifest:
        """See Trainer.publish."""
        manifest = self._weights.publish(self._version, dict(self.model.named_parameters()))
        self._version = manifest.version
        return manifest

    def score(
        self, sequences: Sequence[NDArray[np.int32]], routes: Sequence[NDArray[Any]] | None = None
    ) -> list[Scores]:
        """See Trainer.score."""
        scored = score_sequences(self.model, sequences, routes=routes)
        return [Scores(logprobs, self._version) for logprobs in scored]

    def save(self, directory: Path, extra: Mapping[str, Any] | None = None) -> None:
        """See Trainer.save. `extra`: plain values of the caller's, stored beside the trainer's state."""
        state: dict[str, Any] = {
            **(extra or {}),
            "optimizer": self._optimizer.state_dict(),
            "lineage": self._version.lineage,
            "step": self._version.step,
        }
        if self._reference is not None:
            state["reference"] = self._reference.state_dict()
        save_checkpoint(directory, self.model, state)

    def restore(self, directory: Path) -> None:
        """See Trainer.restore."""
        model, state = load_checkpoint(directory)
        if state is None or "optimizer" not in state:
            raise CheckpointError("has no optimiser state", field="checkpoint", received=str(directory))
        if model.config != self.model.config or model.vocab_size != self.model.vocab_size:
            raise CheckpointError("is of another architecture", field="checkpoint", received=model.config)
        self._optimizer.load_state_dict(state["optimizer"])
        self.model.load_state_dict(model.state_dict())
        self._version = PolicyVersion(state["lineage"], state["step"])
        if self._reference is not None and "reference" in state:
            self._reference.load_state_dict(state["reference"])

    def _update(self, sequences: Sequence[TrainingSequence], meter: _Meter) -> None:
        """One optimiser update on `sequences`."""
        normalizer = self._normalizer(sequences)
        trained = [sequence for sequence in sequences if self._has_gradient(sequence)]
        if not trained:
            return
        num_tokens = sum(len(sequence.tokens) for sequence in trained)
        for batch in micro_batches(trained, self._micro_batch_tokens):
            share = sum(len(sequence.tokens) for sequence in batch) / num_tokens
            self._accumulate(batch, normalizer, share, meter)
        meter.norms.append(self._optimizer.step())

    def _has_gradient(self, sequence: TrainingSequence) -> bool:
        matters = sequence.advantage != 0.0 or self._config.loss.kl_weight > 0
        return matters and bool(sequence.sampled.any())

    def _normalizer(self, sequences: Sequence[TrainingSequence]) -> float:
        loss = self._config.loss
        if loss.normalizer == "tokens":
            return float(sum(int(sequence.sampled.sum()) for sequence in sequences))
        if loss.normalizer == "sequences":
            return float(len(sequences))
        return float(len(sequences) * loss.constant_tokens)

    def _accumulate(
        self, sequences: Sequence[TrainingSequence], normalizer: float, batch_share: float, meter: _Meter
    ) -> None:
        """Adds the gradient of one micro-batch, which holds `batch_share` of the update's tokens."""
        loss_config = self._config.loss
        batch = PackedSequences.pack([sequence.tokens for sequence in sequences])
        sampled = batch.pack_rows([sequence.sampled for sequence in sequences])
        targets = sampled.nonzero().flatten()
        old = batch.pack_rows([sequence.logprobs for sequence in sequences])[targets]
        shares = batch.pack_rows([_shares(s, loss_config.normalizer) for s in sequences])[targets]
        advantages = batch.pack_rows([_advantages(s) for s in sequences])[targets]
        routes = None
        if self._config.router_replay:
            routes = batch.pack_rows([s.routes for s in sequences if s.routes is not None])
        statistics = RouterStatistics([], []) if loss_config.balance_weight > 0 else None
        logprobs, entropy = packed_logprobs(
            self.model,
            batch,
            targets,
            temperature=self._config.temperature,
            routes=routes,
            statistics=statistics,
        )
        terms = self._loss_terms(logprobs, old, advantages)
        total = (shares * terms.per_token).sum() / normalizer
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = packed_logprobs(
                    self._reference, batch, targets, temperature=self._config.temperature, routes=routes
                )
            total = total + loss_config.kl_weight * (shares * k3(logprobs, reference)).sum() / normalizer
        if statistics is not None:
            total = total + loss_config.balance_weight * batch_share * statistics.balance_loss()
        total.backward()
        meter.add(batch, logprobs.detach(), old, entropy, terms)

    def _loss_terms(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> LossTerms:
        loss = self._config.loss
        if self._config.algorithm == "rejection_sampling":
            ratio = (logprobs.detach() - old).exp()
            return LossTerms(-advantages * logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))
        if loss.kind == "cispo":
            return cispo(logprobs, old, advantages, loss.cispo_cap)
        return clipped_surrogate(logprobs, old, advantages, loss.clip_low, loss.clip_high)


class _Meter:
    """Sums what the micro-batches of one step report."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.same_version = True
        """Whether the weights are still those that sampled: then differences are the engine's, not drift."""
        self._parity: list[Tensor] = []
        self._tokens = 0
        self._ratios: list[Tensor] = []
        self._log_ratios: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._clipped: list[Tensor] = []

    def add(
        self, batch: PackedSequences, logprobs: Tensor, old: Tensor, entropy: Tensor, terms: LossTerms
    ) -> None:
        self._tokens += len(batch.tokens)
        self._ratios.append(terms.ratio)
        self._log_ratios.append(logprobs - old)
        self._entropies.append(entropy)
        self._clipped.append(terms.clipped)
        if self.same_version:
            self._parity.append(logprobs - old)

    def summary(self, elapsed_s: float, num_skipped: int) -> dict[str, float]:
        base = {
            "train_s": elapsed_s,
            "train_tokens": float(self._tokens),
            "skipped_updates": float(num_skipped),
        }
        if not self._ratios:
            return base
        log_ratios = torch.cat(self._log_ratios)
        ratios = torch.cat(self._ratios)
        parity = torch.cat(self._parity) if self._parity else log_ratios.new_zeros(1)
        return base | {
            "parity_k3": float((parity.exp() - 1 - parity).mean()),
            "parity_max": float(parity.abs().max()),
            "grad_norm": sum(self.norms) / len(self.norms),
            "ratio_p99": _quantile(ratios, 0.99),
            "ratio_max": float(ratios.max()),
            "clipped_share": float(torch.cat(self._clipped).float().mean()),
            "k1": float(-log_ratios.mean()),
            "k3": float((log_ratios.exp() - 1 - log_ratios).mean()),
            "entropy": float(torch.cat(self._entropies).mean()),
        }


def _shares(sequence: TrainingSequence, normalizer: str) -> NDArray[np.float32]:
    """What each token's loss counts for, [T]: 1, or 1 over their number when sequences count alike."""
    share = 1.0 / int(sequence.sampled.sum()) if normalizer == "sequences" else 1.0
    return np.full(len(sequence.tokens), share, dtype=np.float32)


def _advantages(sequence: TrainingSequence) -> NDArray[np.float32]:
    """[T] the trajectory's advantage on every token."""
    return np.full(len(sequence.tokens), sequence.advantage, dtype=np.float32)


def _frozen_copy(model: Qwen3Moe) -> Qwen3Moe:
    return copy.deepcopy(model).requires_grad_(requires_grad=False)


def _quantile(values: Tensor, share: float) -> float:
    """The value that `share` of `values` [N] do not exceed; for any N, unlike torch.quantile."""
    return float(values.kthvalue(max(1, round(share * len(values)))).values)
