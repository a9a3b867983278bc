"""Values of the members of a group, and their advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from etude.algorithms.baselines import BASELINES
from etude.config import Baseline
from etude.records import RewardBreakdown

ROUNDING = 1e-9
"""Values that differ by less are equal: sums of the same terms need not be equal bit for bit."""


def session_price(reward: RewardBreakdown, most: float) -> float:
    """The price of a session: a concave function, below `most`, of the summed costs of its reward's terms.

    Costs p give the price most * (1 - exp(-p / most)): nearly p while it is small, and never `most`. If
    bonuses outweigh the costs, their sum is the price, which is then negative.
    """
    cost = -sum(reward.terms.values())
    return -most * math.expm1(-cost / most) if cost > 0 else cost


def member_value(reward: RewardBreakdown, most: float, weight: float) -> float:
    """The value of a session within its group: its verdict if it failed, 1 minus its price if it solved.

    Costs act among successes only. In a failed session they would pay for giving up: a session that does less
    spends less. `weight`, 0 to 1, is that of the price, which stays below `most`.
    """
    return reward.task if reward.task < 1.0 else reward.task - weight * session_price(reward, most)


def value_advantages(values: Sequence[float], baseline: Baseline) -> NDArray[np.float32]:
    """[members] each value against the named baseline. Equal values give exactly 0."""
    if len(values) == 0 or np.ptp(values) < ROUNDING:
        return np.zeros(len(values), dtype=np.float32)
    return BASELINES[baseline](np.array(values, dtype=np.float64)).astype(np.float32)
