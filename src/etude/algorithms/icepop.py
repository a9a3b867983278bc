"""A two-sided mask on tokens whose probabilities differ too much between trainer and engine."""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.terms import importance_ratio


def token_mask(proximal_logprobs: Tensor, rollout_logprobs: Tensor, low: float, high: float) -> Tensor:
    """[N] bool: low <= proximal / rollout <= high.

    Where trainer and engine disagree the gradient is noise, whichever is the larger: such tokens are left
    out instead of weighted (IcePop: Ling team 2025, with 0.5 and 5).
    """
    ratio = importance_ratio(proximal_logprobs, rollout_logprobs)
    return (ratio >= low) & (ratio <= high)
