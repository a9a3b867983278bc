"""The configured loss of one micro-batch, composed of the terms in `etude.algorithms`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.algorithms.cispo import cispo
from etude.algorithms.clip import clipped_surrogate
from etude.algorithms.decoupled import decoupled
from etude.algorithms.divergence import k1, k2, k3
from etude.algorithms.geometric_mask import geometric_mask
from etude.algorithms.gspo import gspo
from etude.algorithms.icepop import token_mask
from etude.algorithms.rejection import rejection_sampling
from etude.algorithms.terms import LossTerms
from etude.algorithms.tis import truncated_weights
from etude.config import CorrectionConfig, LossConfig, RlConfig
from etude.model.scoring import PackedSequences
from etude.training.batches import TrainingSequence


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of the loss for the N trained tokens of a micro-batch. All tensors are [N]."""

    rollout: Tensor
    """Log-probabilities as sampled."""
    proximal: Tensor | None
    """The trainer's at the step's start; None if they equal the current ones."""
    advantages: Tensor
    weights: Tensor
    """Each token's share under the normaliser."""
    sequence: Tensor
    """int64: which sequence of the micro-batch, from 0 in packed order."""
    places: Tensor
    """int64: index of the token among all trained tokens of the step."""

    @staticmethod
    def of(sequences: Sequence[TrainingSequence], batch: PackedSequences) -> tuple[Rows, Tensor]:
        """The rows of packed sequences, and the targets [N]: their indices in the batch."""
        targets = batch.pack_rows([s.sampled for s in sequences]).nonzero().flatten()
        device = targets.device
        ordered = [sequences[i] for i in batch.order]
        counts = torch.tensor([s.num_trained for s in ordered], device=device)

        def spread(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).repeat_interleave(counts)

        proximal = [s.proximal for s in sequences if s.proximal is not None]
        rows = Rows(
            rollout=batch.pack_rows([s.logprobs for s in sequences])[targets],
            proximal=batch.pack_rows(proximal)[targets] if len(proximal) == len(sequences) else None,
            advantages=batch.pack_rows([s.advantages for s in sequences])[targets],
            weights=spread([s.weight for s in ordered]),
            sequence=torch.arange(len(ordered), device=device).repeat_interleave(counts),
            places=batch.pack_rows([s.places for s in sequences])[targets],
        )
        return rows, targets


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of one micro-batch."""

    total: Tensor
    """Scalar, differentiable: summed over micro-batches it is the update's loss."""
    terms: LossTerms
    masked: Tensor
    """[N] bool: tokens that a correction masked."""


def policy_loss(
    config: RlConfig, logprobs: Tensor, rows: Rows, reference_logprobs: Tensor | None = None
) -> PolicyLoss:
    """The loss of N tokens with current log-probabilities [N].

        sum over tokens of  weight * (correction * surrogate(ratio, advantage) + kl_weight * penalty)

    `reference_logprobs` [N]: of the policy at the start of RL, if the divergence from it is penalised.
    """
    loss = config.loss
    terms = _terms(config, logprobs, rows)
    proximal = _proximal(logprobs, rows)
    correction, kept = _correction(loss.correction, proximal, rows)
    per_token = torch.where(kept, correction * terms.per_token, 0.0)
    if reference_logprobs is not None:
        per_token = per_token + loss.kl_weight * _penalty(loss, logprobs, rows, reference_logprobs)
    return PolicyLoss((rows.weights * per_token).sum(), terms, ~kept)


def _penalty(loss: LossConfig, logprobs: Tensor, rows: Rows, reference_logprobs: Tensor) -> Tensor:
    """[N] penalty on the divergence from the reference. The tokens were drawn from the sampling policy, while
    the divergence is an expectation over the current one: hence the importance weight."""
    weights = truncated_weights(logprobs, rows.rollout, loss.correction.tis_cap or float("inf"))
    if loss.kl == "k1":
        return weights * k1(logprobs, reference_logprobs).detach() * logprobs
    return weights * (k2 if loss.kl == "k2" else k3)(logprobs, reference_logprobs)


def _terms(config: RlConfig, logprobs: Tensor, rows: Rows) -> LossTerms:
    loss, advantages = config.loss, rows.advantages
    if config.algorithm != "policy_gradient":
        return rejection_sampling(logprobs, rows.rollout, advantages)
    anchor = _proximal(logprobs, rows) if loss.needs_proximal else rows.rollout
    match loss.kind:
        case "cispo":
            return cispo(logprobs, anchor, advantages, loss.cispo_cap)
        case "gspo":
            bounds = loss.gspo_clip_low, loss.gspo_clip_high
            return gspo(logprobs, anchor, advantages, rows.sequence, *bounds)
        case "decoupled" if not loss.correction.tis_cap:
            return decoupled(logprobs, anchor, rows.rollout, advantages, loss.clip_low, loss.clip_high)
        case _:
            # With a cap, the weight of `decoupled` is the correction's, truncated.
            return clipped_surrogate(logprobs, anchor, advantages, loss.clip_low, loss.clip_high)


def _proximal(logprobs: Tensor, rows: Rows) -> Tensor:
    """Log-probabilities under the policy at the step's start; in the first update, the current one."""
    return logprobs.detach() if rows.proximal is None else rows.proximal


def _correction(config: CorrectionConfig, proximal: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Weights of the tokens' losses [N], and which tokens are kept [N] bool, under the corrections."""
    weights = torch.ones_like(proximal)
    kept = torch.ones_like(proximal, dtype=torch.bool)
    if config.tis_cap:
        weights = truncated_weights(proximal, rows.rollout, config.tis_cap)
    if config.token_low or config.token_high:
        kept = token_mask(proximal, rows.rollout, config.token_low, config.token_high or float("inf"))
    if config.sequence_low or config.sequence_high:
        high = config.sequence_high or float("inf")
        kept = kept & geometric_mask(proximal, rows.rollout, rows.sequence, config.sequence_low, high)
    return weights, kept
