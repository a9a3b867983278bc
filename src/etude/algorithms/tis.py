"""Truncated importance sampling against the policy that sampled."""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.terms import importance_ratio


def truncated_weights(proximal_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(proximal / rollout, cap), [N], detached: multiplies a token's loss.

    Corrects for numerical differences between engine and trainer, and for staleness, at a bounded variance
    (Ionides 2008; between engines: Yao et al. 2025).
    """
    return importance_ratio(proximal_logprobs, rollout_logprobs).clamp(max=cap).detach()
