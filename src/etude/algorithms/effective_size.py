"""Effective sample size of importance-weighted samples."""

from __future__ import annotations

from torch import Tensor


def effective_sample_share(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2) of importance weights [N], N > 0: 1 where all are equal, 1/N where one counts.

    Kish 1965.
    """
    values = weights.double()
    values = values / values.max()
    return float(values.sum().square() / (len(values) * values.square().sum()))
