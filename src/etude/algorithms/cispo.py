"""CISPO: the importance weight is clipped, not the update."""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.terms import LossTerms, importance_ratio


def cispo(logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, cap: float) -> LossTerms:
    """-min(ratio, cap).detach() * A * log p, everything [N].

    Every token keeps a gradient, however far its ratio has moved (MiniMax-M1, 2025, eq. 4 and 5).
    """
    ratio = importance_ratio(logprobs.detach(), anchor_logprobs)
    return LossTerms(-ratio.clamp(max=cap) * advantages * logprobs, ratio, ratio > cap)
