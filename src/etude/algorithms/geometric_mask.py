"""A mask on whole sequences that have drifted from the policy that sampled them."""

from __future__ import annotations

from torch import Tensor

from etude.algorithms.sequence_means import sequence_means


def geometric_mask(
    proximal_logprobs: Tensor, rollout_logprobs: Tensor, sequence: Tensor, low: float, high: float
) -> Tensor:
    """[N] bool, one value per sequence: low <= exp(mean log (proximal / rollout)) <= high.

    The geometric mean does not grow with the length, as a product of ratios does: long sessions are not
    masked for being long (Liu et al. 2025, "When speed kills stability"). `sequence` as in `gspo`.
    """
    means = sequence_means(proximal_logprobs - rollout_logprobs, sequence).exp()
    return ((means >= low) & (means <= high))[sequence]
