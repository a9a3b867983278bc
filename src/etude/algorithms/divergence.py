"""Estimators of the Kullback-Leibler divergence from samples (Schulman 2020). Everything [N], per token.

KL(p || reference) for tokens drawn from p; for tokens that another policy drew, each needs its importance
weight. `k1` is unbiased as a value, and has a gradient that is 0 in expectation: detached, it multiplies the
log-probability, which then has the gradient of the divergence (Tang and Munos 2025). `k2` has that gradient
as a loss (Liu et al. 2025, arXiv 2510.01555). `k3` has the lowest variance as a value; as a loss it has the
gradient of KL(reference || p).
"""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.terms import MAX_LOG_RATIO


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log (p / reference)."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log (p / reference))^2 / 2 >= 0."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """r - 1 - log r >= 0, where r = reference / p."""
    log_ratio = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - 1.0 - log_ratio
