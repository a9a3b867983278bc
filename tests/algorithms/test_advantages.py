"""Values of group members, and advantages over a baseline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms.advantages import member_value, session_price, value_advantages
from etude.algorithms.baselines import BASELINES
from etude.config import Baseline, RewardConfig
from etude.records import RewardBreakdown

_VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]), min_size=2, max_size=9)


@settings(max_examples=30)
@given(_VALUES)
def test_advantages_sum_to_zero_and_compare_with_what_the_baseline_names(values: list[float]) -> None:
    plain = value_advantages(values, "group_mean")
    assert plain.dtype == np.float32
    np.testing.assert_allclose(plain, np.array(values) - np.mean(values), atol=1e-6)
    others = [(sum(values) - value) / (len(values) - 1) for value in values]
    np.testing.assert_allclose(
        value_advantages(values, "leave_one_out"), np.array(values) - others, atol=1e-6
    )
    scaled = value_advantages(values, "group_mean_std")
    assert not plain.any() or np.std(scaled) == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_array_equal(np.sign(scaled), np.sign(plain))


@pytest.mark.parametrize("baseline", list(BASELINES))
def test_equal_values_and_one_member_alone_give_exactly_nothing(baseline: Baseline) -> None:
    """The mean of equal numbers need not be that number, and a deviation of 1e-17 must not divide."""
    for value in (-0.05, -0.1, -0.15000000000000002):
        assert not value_advantages([value] * 3, baseline).any()
    assert value_advantages([1.0], baseline).tolist() == [0.0]
    assert value_advantages([], baseline).tolist() == []


_COSTS = st.floats(0, 50)


@settings(max_examples=30)
@given(_COSTS, _COSTS, st.floats(0, 0.99), st.floats(0, 1))
def test_the_price_is_concave_and_the_dearest_success_is_worth_more_than_the_best_failure(
    one: float, other: float, partial: float, weight: float
) -> None:
    most = RewardConfig(partial_weight=partial).most_price

    def price(cost: float) -> float:
        return session_price(RewardBreakdown(1.0, {"length": -cost / 2, "malformed": -cost / 2}), most)

    low, high = sorted((price(one), price(other)))
    assert price(min(one, other)) == low, "who does more never pays less"
    assert price((one + other) / 2) >= (low + high) / 2 - 1e-12
    assert price(one) <= one + 1e-12
    assert price(1e-6) == pytest.approx(1e-6, rel=1e-2)
    dearest = member_value(RewardBreakdown(1.0, {"length": -one}), most, weight)
    assert dearest > member_value(RewardBreakdown(partial, {"custom": 5.0}), most, weight)


def test_what_pays_more_than_it_costs_counts_as_it_is() -> None:
    assert session_price(RewardBreakdown(1.0, {"custom": 0.3, "limit": -0.1}), 0.5) == pytest.approx(-0.2)
