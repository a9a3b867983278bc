"""PPO's clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms.terms import LossTerms, importance_ratio


def clipped_surrogate(
    logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, low: float, high: float
) -> LossTerms:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), everything [N].

    PPO (Schulman et al. 2017) with the asymmetric bounds of DAPO (Yu et al. 2025): a rare token may gain more
    than a likely one may lose.
    """
    return bounded_surrogate(importance_ratio(logprobs, anchor_logprobs), advantages, low, high)


def bounded_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> LossTerms:
    """The clipped surrogate of given ratios [N], which are differentiable."""
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    clipped = bounded.detach() * advantages < ratio.detach() * advantages
    return LossTerms(-surrogate, ratio.detach(), clipped)
