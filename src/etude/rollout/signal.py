"""What the trainer can learn from a group."""

from __future__ import annotations

from enum import StrEnum

from etude.algorithms.advantages import MALFORMED, has_task_variance
from etude.records import Group, RewardBreakdown, Status


class Signal(StrEnum):
    """What differs between the members of a group."""

    TASK = "task"
    """The verdict."""
    FORM = "form"
    """All failed, some with more malformed calls than others: that much can be learnt."""
    NONE = "none"
    """Nothing: the group is dropped and replaced (Yu et al. 2025, dynamic sampling)."""


def signal_of(group: Group) -> Signal:
    """What the members that were graded differ in."""
    rewards = graded_rewards(group)
    if len(rewards) > 1 and has_task_variance(rewards):
        return Signal.TASK
    failed = all(reward.task < 1.0 for reward in rewards)
    if failed and len({reward.terms.get(MALFORMED, 0.0) for reward in rewards}) > 1:
        return Signal.FORM
    return Signal.NONE


def graded_rewards(group: Group) -> list[RewardBreakdown]:
    """Of the members that were graded: what we failed has no reward, and what is no finite number is none."""
    rewards = [m.reward for m in group.members if m.status is not Status.INFRASTRUCTURE]
    return [reward for reward in rewards if reward is not None and reward.is_finite]
