"""Fine-tuning on successful trajectories (rejection sampling)."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms.terms import LossTerms, importance_ratio


def rejection_sampling(logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor) -> LossTerms:
    """-A * log p, everything [N], where A is 1 for the trajectories that are kept and 0 for the rest.

    No ratio enters the loss: a control for what the policy gradient adds (RAFT, Dong et al. 2023).
    """
    ratio = importance_ratio(logprobs.detach(), anchor_logprobs)
    return LossTerms(-advantages * logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))
