"""Advantages within a group: the verdict alone decides whether there is something to learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.advantages import group_advantages, has_task_variance
from etude.algorithms.baselines import BASELINES
from etude.config import Baseline
from etude.records import RewardBreakdown

_REWARDS = st.builds(
    lambda task, limit, malformed: RewardBreakdown(task, {"limit": limit, "malformed": malformed}),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, -0.1]),
    st.sampled_from([0.0, -0.05, -0.2]),
)


@given(st.lists(_REWARDS, min_size=1, max_size=9))
def test_advantages_sum_to_zero_and_keep_the_order_of_totals(rewards: list[RewardBreakdown]) -> None:
    advantages = group_advantages(rewards)
    assert advantages.dtype == np.float32
    assert abs(float(advantages.astype(np.float64).sum())) < 1e-5
    if has_task_variance(rewards):
        mean = np.mean([reward.total for reward in rewards])
        np.testing.assert_allclose(advantages, [reward.total - mean for reward in rewards], atol=1e-6)


def test_penalties_count_in_full_where_verdicts_differ() -> None:
    rewards = [RewardBreakdown(1.0, {"limit": -0.1}), RewardBreakdown(0.0, {"malformed": -0.2})]
    np.testing.assert_allclose(group_advantages(rewards), [0.55, -0.55], atol=1e-7)


@pytest.mark.parametrize("verdict", [0.0, 1.0])
def test_with_one_verdict_for_all_only_malformed_calls_carry(verdict: float) -> None:
    rewards = [
        RewardBreakdown(verdict, {"limit": -0.1}),
        RewardBreakdown(verdict, {"malformed": -0.2, "limit": -0.1}),
        RewardBreakdown(verdict),
        RewardBreakdown(verdict),
    ]
    assert not has_task_variance(rewards)
    np.testing.assert_allclose(group_advantages(rewards), [0.05, -0.15, 0.05, 0.05], atol=1e-7)


def test_equal_rewards_give_exactly_nothing_with_either_normaliser() -> None:
    """The mean of equal numbers need not be that number, and a deviation of 1e-17 must not divide."""
    for value in (-0.05, -0.1, -0.15000000000000002):
        rewards = [RewardBreakdown(1.0, {"malformed": value})] * 3
        for baseline in BASELINES:
            assert not group_advantages(rewards, baseline).any()


@given(st.lists(_REWARDS, min_size=2, max_size=9))
def test_dividing_by_the_deviation_gives_unit_variance(rewards: list[RewardBreakdown]) -> None:
    plain = group_advantages(rewards)
    advantages = group_advantages(rewards, "group_mean_std")
    if plain.any():
        assert np.std(advantages) == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_array_equal(np.sign(advantages), np.sign(plain))


def test_variance_is_judged_on_the_task_alone() -> None:
    assert not has_task_variance([RewardBreakdown(0.0), RewardBreakdown(0.0, {"malformed": -0.2})])
    assert has_task_variance([RewardBreakdown(0.0), RewardBreakdown(1.0, {"limit": -1.0})])


@given(st.lists(_REWARDS, min_size=2, max_size=9))
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards: list[RewardBreakdown]) -> None:
    if not has_task_variance(rewards):
        return
    totals = [reward.total for reward in rewards]
    expected = [
        total - sum(totals[:i] + totals[i + 1 :]) / (len(totals) - 1) for i, total in enumerate(totals)
    ]
    np.testing.assert_allclose(group_advantages(rewards, "leave_one_out"), expected, atol=1e-6)


@pytest.mark.parametrize("baseline", list(BASELINES))
def test_one_member_alone_has_no_advantage(baseline: Baseline) -> None:
    assert group_advantages([RewardBreakdown(1.0)], baseline).tolist() == [0.0]
    assert group_advantages([], baseline).tolist() == []
