"""Result type and importance ratio of all policy losses. Tensors are [N], one entry per trained token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-this: beyond it a loss is flat, and finite in every number format."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss before it is normalised."""

    per_token: Tensor
    """[N] to be weighted and summed, differentiable."""
    ratio: Tensor
    """[N] importance ratio of the present policy over the anchor, detached."""
    clipped: Tensor
    """[N] bool: where the cap or the clip took effect."""


def importance_ratio(logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """pi(token) / anchor(token), [N], within e^+-MAX_LOG_RATIO; differentiable in `logprobs`."""
    return (logprobs - anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
