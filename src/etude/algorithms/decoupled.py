"""Decoupled PPO: the policy that bounds the step is not the one that sampled."""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.clip import clipped_surrogate
from etude.algorithms.terms import LossTerms, importance_ratio


def decoupled(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
) -> LossTerms:
    """(proximal / behaviour).detach() * clipped surrogate against the proximal policy, everything [N].

    The proximal policy is the trainer's own at the step's start, the behaviour policy the one that sampled:
    old samples are weighted by how likely they would be now, and the step is bounded from where it starts
    (Hilton et al. 2021, eq. 2; asynchronous: AReaL, Fu et al. 2025).
    """
    terms = clipped_surrogate(logprobs, proximal_logprobs, advantages, low, high)
    weight = importance_ratio(proximal_logprobs, behaviour_logprobs).detach()
    return LossTerms(weight * terms.per_token, terms.ratio, terms.clipped)
