"""Baselines: a member's reward minus what it is compared with. Rewards and advantages [members], float64.

Each gets the rewards of one group with at least one member; a trajectory is one member, however many
segments its chain has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from etude.config import Baseline

Values = NDArray[np.float64]


def group_mean(rewards: Values) -> Values:
    """Reward minus the group's mean (Dr.GRPO, Liu et al. 2025)."""
    return rewards - rewards.mean()


def group_mean_std(rewards: Values) -> Values:
    """`group_mean` divided by the group's standard deviation: GRPO (Shao et al. 2024). Rewards must differ.

    Groups that nearly all members solve, or nearly none, weigh most.
    """
    return group_mean(rewards) / rewards.std()


def leave_one_out(rewards: Values) -> Values:
    """Reward minus the mean of the others: RLOO (Kool et al. 2019; Ahmadian et al. 2024).

    n / (n - 1) times `group_mean`: unbiased, where a mean that holds the reward itself is not. One member
    alone has nothing to be compared with: 0.
    """
    count = len(rewards)
    return group_mean(rewards) * (count / (count - 1)) if count > 1 else np.zeros(1)


BASELINES: Mapping[Baseline, Callable[[Values], Values]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
"""By their names in the configuration."""
