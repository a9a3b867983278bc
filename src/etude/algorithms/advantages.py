"""Advantages of the members of one group against each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from etude.algorithms.baselines import BASELINES
from etude.config import Baseline
from etude.records import RewardBreakdown

MALFORMED = "malformed"
"""The reward term that still teaches where the whole group failed."""

_ROUNDING = 1e-9
"""Rewards that differ by less are equal: sums of the same terms need not be equal bit for bit."""


def has_task_variance(rewards: Sequence[RewardBreakdown]) -> bool:
    """Whether the task's verdict differs within the group: the other terms do not count."""
    return len({reward.task for reward in rewards}) > 1


def group_advantages(
    rewards: Sequence[RewardBreakdown], baseline: Baseline = "group_mean"
) -> NDArray[np.float32]:
    """Each member's advantage under the named baseline, [members]. Rewards must be finite.

    Where the task's verdict is the same for all, only malformed calls carry advantage: in a group that failed
    as a whole, a penalty for effort would teach the policy to give up. Equal rewards give exactly 0.
    """
    if has_task_variance(rewards):
        values = np.array([reward.total for reward in rewards], dtype=np.float64)
    else:
        values = np.array([reward.terms.get(MALFORMED, 0.0) for reward in rewards], dtype=np.float64)
    if len(values) == 0 or np.ptp(values) < _ROUNDING:
        return np.zeros(len(values), dtype=np.float32)
    return BASELINES[baseline](values).astype(np.float32)
