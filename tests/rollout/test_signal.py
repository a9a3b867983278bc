import math
from dataclasses import replace

import pytest

from etude.algorithms.advantages import MALFORMED
from etude.records import Group, RewardBreakdown, Status
from etude.rollout.signal import Signal, graded_rewards, signal_of
from tests.store.builders import make_trajectory


def group(*rewards: RewardBreakdown | None) -> Group:
    members = (
        replace(make_trajectory(index), reward=reward)
        if reward is not None
        else replace(make_trajectory(index), reward=None, status=Status.INFRASTRUCTURE)
        for index, reward in enumerate(rewards)
    )
    return Group("g", "task", len(rewards), tuple(members))


def reward(task: float, malformed: float = 0.0) -> RewardBreakdown:
    return RewardBreakdown(task, {MALFORMED: malformed})


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ((reward(1.0), reward(0.0)), Signal.TASK),
        ((reward(1.0), reward(1.0)), Signal.NONE),
        ((reward(1.0, -0.1), reward(1.0)), Signal.NONE),
        ((reward(0.0, -0.1), reward(0.0)), Signal.FORM),
        ((reward(0.25, -0.1), reward(0.25)), Signal.FORM),  # partial credit is no success
        ((reward(0.25), reward(0.5)), Signal.TASK),
        ((reward(0.0), reward(0.0)), Signal.NONE),
        ((reward(1.0), None), Signal.NONE),
        ((None, None), Signal.NONE),
    ],
)
def test_what_can_be_learnt_is_what_graded_members_differ_in(rewards, signal: Signal) -> None:
    assert signal_of(group(*rewards)) is signal


def test_rewards_that_are_no_numbers_make_no_difference() -> None:
    odd = group(reward(1.0), reward(math.nan), reward(1.0, -math.inf))
    assert graded_rewards(odd) == [reward(1.0)]
    assert signal_of(odd) is Signal.NONE
