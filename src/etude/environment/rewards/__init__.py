"""Rewards: the verdict of hidden tests, and priced terms over what a session did, left and spent."""

from etude.environment.rewards.length import Effort, concave_price, measure_effort
from etude.environment.rewards.review import review_changes
from etude.environment.rewards.terms import (
    LENGTH,
    REWARD_VERSION,
    Evidence,
    check_reward,
    compute_reward,
    with_length,
)

__all__ = [
    "LENGTH",
    "REWARD_VERSION",
    "Effort",
    "Evidence",
    "check_reward",
    "compute_reward",
    "concave_price",
    "measure_effort",
    "review_changes",
    "with_length",
]
