"""GSPO: one ratio per sequence."""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.clip import bounded_surrogate
from etude.algorithms.sequence_means import sequence_means
from etude.algorithms.terms import MAX_LOG_RATIO, LossTerms


def gspo(
    logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    low: float,
    high: float,
) -> LossTerms:
    """The clipped surrogate of s = exp(mean over the sequence of log ratio), given to each of its tokens.

    `sequence` [N] int64 numbers the sequence of each token from 0; all of a sequence's tokens must be there.
    Under the normaliser `sequences` this is GSPO (Zheng et al. 2025, eq. 5-7). The bounds belong to a
    geometric mean, so they are a thousandth of a token's. A chain's segments are sequences of their own: each
    is one context, and what a summary moved says nothing of the context before it.
    """
    means = sequence_means(logprobs - anchor_logprobs, sequence)
    ratio = means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return bounded_surrogate(ratio[sequence], advantages, low, high)
