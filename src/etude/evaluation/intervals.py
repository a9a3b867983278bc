"""Confidence intervals for few tasks, where the normal approximation is too narrow (arXiv 2503.01747).

Pure Python: the regularised incomplete beta function by its continued fraction (Numerical Recipes, 6.4) and
its inverse by bisection. `tests/evaluation/test_intervals.py` holds the values that SciPy gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
_TINY = 1e-300
_MAX_TERMS = 1_000
_HALVINGS = 60


def clopper_pearson(passed: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """The exact interval of a proportion (Clopper and Pearson 1934): its coverage is never below `level`.

    `passed` and `n` need not be whole: see `clustered_interval`. (0, 1) where nothing was tried.
    """
    if n <= 0:
        return 0.0, 1.0
    tail = (1 - level) / 2
    low = beta_quantile(tail, passed, n - passed + 1) if passed > 0 else 0.0
    high = beta_quantile(1 - tail, passed + 1, n - passed) if passed < n else 1.0
    return low, high


def clustered_interval(
    values: Sequence[float], clusters: Sequence[str], level: float = LEVEL
) -> tuple[float, float]:
    """An interval of the mean of `values` (each in [0, 1], one per task), for any number of tasks.

    Clopper and Pearson's with the effective number of tasks of Korn and Graubard (1998): tasks of one cluster
    (`clusters`, one per task) count for less the more correlated they are, never for more than their number.
    It is exact if every task is its own cluster and was tried once. (0, 1) for a single cluster.
    """
    n, num_clusters = len(values), len(set(clusters))
    if num_clusters < 2:
        return 0.0, 1.0
    mean = math.fsum(values) / n
    if mean <= 0.0 or mean >= 1.0:  # the correlation is unknown: as if each cluster were one task
        return clopper_pearson(round(mean) * num_clusters, num_clusters, level)
    variance = standard_error(values, clusters) ** 2
    effective = mean * (1 - mean) / variance + 1 if variance > 0 else float(n)
    tail = (1 + level) / 2
    if num_clusters < n:
        effective *= (student_quantile(tail, n - 1) / student_quantile(tail, num_clusters - 1)) ** 2
    effective = min(effective, float(n))
    return clopper_pearson(mean * effective, effective, level)


def standard_error(values: Sequence[float], clusters: Sequence[str]) -> float:
    """The standard error of the mean of `values` whose errors are correlated within a cluster (arXiv
    2411.00640, section 2.2, with the factor G / (G - 1) for G clusters); infinite for a single cluster."""
    array = np.asarray(values, dtype=np.float64)
    totals = cluster_sums(array - float(array.mean()), clusters)
    num_clusters = len(totals)
    if num_clusters < 2:
        return math.inf
    return math.sqrt(num_clusters / (num_clusters - 1) * float((totals**2).sum())) / len(values)


def cluster_sums(values: NDArray[np.float64], clusters: Sequence[str]) -> NDArray[np.float64]:
    """[G] sums of `values` ([n] or [n, m], then [G, m]) by cluster, in the order of the clusters' names."""
    _, places = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.zeros((int(places.max()) + 1, *values.shape[1:]))
    np.add.at(sums, places, values)
    return sums


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), the distribution function of Beta(a, b) at x."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _beta_fraction(x, a, b) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(1 - x, b, a) / b


def beta_quantile(p: float, a: float, b: float) -> float:
    """The x in [0, 1] at which I_x(a, b) is `p`."""
    return _bisect(lambda x: incomplete_beta(x, a, b), p)


def student_quantile(p: float, degrees: float) -> float:
    """The quantile at `p` > 0.5 of Student's distribution."""
    # t² / (degrees + t²) is distributed as Beta(1/2, degrees / 2).
    share = beta_quantile(2 * p - 1, 0.5, degrees / 2)
    return math.sqrt(degrees * share / max(1 - share, _TINY))


def _bisect(rises: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if rises(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MAX_TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
