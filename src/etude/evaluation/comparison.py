"""Paired comparison of two models on the same tasks.

Pairing removes the difficulty of the tasks from the difference (Miller, arXiv 2411.00640, section 4.2); tasks
of one repository or family are drawn together. Below a few hundred clusters the normal approximation is too
narrow (arXiv 2503.01747), so the p-value and a second interval come from exact distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.evaluation.intervals import LEVEL, cluster_sums, clustered_interval, standard_error
from etude.evaluation.results import EvaluationResult
from etude.evaluation.sessions import SessionRow
from etude.evaluation.statistics import MEANS, mean, pass_rates, verdicts_by_task

MAX_EXACT_CLUSTERS = 300
"""With more clusters the normal approximation is good, and the exact distribution slow."""
_NUM_RESAMPLES = 10_000
_MAX_DRAWS = 10_000_000
_UNITS = 840
"""Differences are counted in units of 1 / 840: exact for up to eight sessions per task on each side."""

Floats = NDArray[np.float64]


def compare_results(first: EvaluationResult, second: EvaluationResult) -> dict[str, Any]:
    """Compares the second model with the first, for each mode (greedy, sampled) that both have.

    Raises ConfigError where they share no mode or no task.
    """
    modes = [mode for mode in first.modes if mode in second.modes]
    if not modes:
        received = f"{', '.join(first.modes)} and {', '.join(second.modes)}"
        fix = "evaluate both greedily, or both with --temperature"
        raise ConfigError("have no temperature in common", field="results", received=received, fix=fix)
    return {
        "first": first.target["label"],
        "second": second.target["label"],
        "suite": first.suite,
        **{mode: compare_rows(first.modes[mode].rows, second.modes[mode].rows) for mode in modes},
    }


def compare_rows(first: Sequence[SessionRow], second: Sequence[SessionRow]) -> dict[str, Any]:
    """Compares two models on the tasks that both have sessions of. Raises ConfigError if there is none.

    Keys: `pass_rate`, `pass_rate_voided_failed` (voided sessions counted as failures), `pass_at` (k -> one,
    for the most samples that both have, if these are more than one), and the means of `MEANS`, each a mapping
    `first`, `second`, `difference`, `ci95` (bootstrap over clusters; None for one cluster alone);
    `pass_rate` also has `standard_error`, `p_value` (exact up to 300 clusters), `exact95` (None beyond),
    `tasks`, `clusters`, `better` and `worse` (tasks on which the second passes more or less often).
    """
    clusters = {row.task: row.cluster for row in first}
    sides = (first, second)
    graded = [pass_rates(verdicts_by_task(rows)) for rows in sides]
    every = [pass_rates(verdicts_by_task(rows, voided_failed=True)) for rows in sides]
    if not graded[0].keys() & graded[1].keys():
        raise ConfigError(
            "have no graded task in common", field="results", fix="evaluate both models on the same suite"
        )
    compared: dict[str, Any] = {
        "pass_rate": _compare_pass_rates(graded[0], graded[1], clusters),
        "pass_rate_voided_failed": _compare(every[0], every[1], clusters),
        **{name: _compare(_means(first, name), _means(second, name), clusters) for name in MEANS},
    }
    verdicts = [verdicts_by_task(rows) for rows in sides]
    k = min(max(len(found) for found in side.values()) for side in verdicts)
    at_k = [pass_rates(side, k) for side in verdicts]
    if k > 1 and at_k[0].keys() & at_k[1].keys():
        compared["pass_at"] = {str(k): _compare(at_k[0], at_k[1], clusters)}
    return compared


def bootstrap_interval(
    differences: Sequence[float], clusters: Sequence[str], level: float = LEVEL
) -> tuple[float, float] | None:
    """Bootstrap percentiles of the mean of `differences` when whole clusters are resampled.

    10,000 resamples, fewer for very many clusters; they are the same each time. None for a single cluster.
    """
    values = np.asarray(differences, dtype=np.float64)
    sums = cluster_sums(np.stack([values, np.ones_like(values)], axis=1), clusters)
    if len(sums) < 2:
        return None
    drawn = _draws(len(sums)) @ sums
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@lru_cache(maxsize=1)
def _draws(num_clusters: int) -> Floats:
    """[resamples, clusters] how often each cluster is drawn."""
    num_resamples = max(1_000, min(_NUM_RESAMPLES, _MAX_DRAWS // num_clusters))
    shape = (num_resamples, num_clusters)
    drawn = np.random.default_rng(0).integers(0, num_clusters, size=shape)
    drawn += num_clusters * np.arange(num_resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=drawn.size).reshape(shape).astype(np.float64)


def exact_difference(
    differences: Sequence[float], clusters: Sequence[str], level: float = LEVEL
) -> tuple[float, float]:
    """Bounds of the mean of `differences` (each in [-1, 1], one per task) that hold for any number of tasks.

    The mean gain minus the mean loss, each within its `clustered_interval` at half of the error: never too
    narrow, and not of width 0 if no task differs.
    """
    half = (1 + level) / 2
    gain = clustered_interval([max(value, 0.0) for value in differences], clusters, half)
    loss = clustered_interval([max(-value, 0.0) for value in differences], clusters, half)
    return gain[0] - loss[1], gain[1] - loss[0]


def exact_p_value(differences: Sequence[float], clusters: Sequence[str]) -> float:
    """The probability of a mean at least so far from 0 if the signs of the clusters' sums were random.

    A two-sided, exact sign-flip test. For one session per task and no clusters it is McNemar's exact test.
    """
    sums = cluster_sums(np.asarray(differences, dtype=np.float64), clusters)
    parts = np.rint(np.abs(sums) * _UNITS).astype(np.int64)
    observed = abs(int(np.rint(sums * _UNITS).astype(np.int64).sum()))
    unit = int(np.gcd.reduce(parts)) or 1
    parts, observed = parts // unit, observed // unit
    most = int(parts.sum())
    chances: Floats = np.zeros(2 * most + 1)
    chances[most] = 1.0
    for part in (int(part) for part in parts if part):
        chances = (np.roll(chances, part) + np.roll(chances, -part)) / 2
    far = np.abs(np.arange(-most, most + 1)) >= observed
    return min(1.0, float(chances[far].sum()))


def normal_p_value(mean_difference: float, error: float) -> float:
    """The same (two-sided) by the normal approximation, for many clusters."""
    if error == 0.0:
        return 1.0 if mean_difference == 0.0 else 0.0
    return math.erfc(abs(mean_difference) / error / math.sqrt(2))


def _compare_pass_rates(
    first: Mapping[str, float], second: Mapping[str, float], clusters: Mapping[str, str]
) -> dict[str, Any]:
    tasks = [task for task in first if task in second]
    differences, groups = [second[task] - first[task] for task in tasks], [clusters[task] for task in tasks]
    num_clusters, error = len(set(groups)), standard_error(differences, groups)
    exact = num_clusters <= MAX_EXACT_CLUSTERS
    return {
        **_compare(first, second, clusters),
        "standard_error": None if math.isinf(error) else error,
        "p_value": exact_p_value(differences, groups) if exact else normal_p_value(mean(differences), error),
        "exact95": list(exact_difference(differences, groups)) if exact else None,
        "tasks": len(tasks),
        "clusters": num_clusters,
        "better": sum(value > 0 for value in differences),
        "worse": sum(value < 0 for value in differences),
    }


def _compare(
    first: Mapping[str, float], second: Mapping[str, float], clusters: Mapping[str, str]
) -> dict[str, Any]:
    tasks = [task for task in first if task in second]
    differences = [second[task] - first[task] for task in tasks]
    interval = bootstrap_interval(differences, [clusters[task] for task in tasks]) if tasks else None
    return {
        "first": mean([first[task] for task in tasks]),
        "second": mean([second[task] for task in tasks]),
        "difference": mean(differences),
        "ci95": None if interval is None else list(interval),
    }


def _means(rows: Sequence[SessionRow], name: str) -> dict[str, float]:
    """Task -> mean of the field `name` over its graded sessions."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.passed is not None:
            found.setdefault(row.task, []).append(float(getattr(row, name) or 0))
    return {task: mean(values) for task, values in found.items()}
