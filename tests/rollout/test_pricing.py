from dataclasses import asdict

import pytest

from etude.config import RewardConfig
from etude.records import RewardBreakdown
from etude.rollout.curriculum import CollectorState
from etude.rollout.pricing import PriceState, measure_price
from tests.store.builders import make_trajectory


@pytest.mark.parametrize(
    ("looks", "weight"),
    [
        ([(0.80, 0.3), (0.78, 0.2)], 0.5),
        ([(0.80, 0.3), (0.79, 0.2)], 1.0),  # a point, not more
        ([(0.80, 0.3), (0.70, 0.3)], 1.0),  # not for the price's sake
        ([(0.80, 0.3), (0.90, 0.2)], 1.0),
        ([(0.80, 0.3), (0.795, 0.25), (0.785, 0.2)], 0.5),  # little by little
        ([(0.80, 0.3), (0.78, 0.2), (0.77, 0.1)], 0.5),  # compared with what was after the change
        ([(0.80, 0.3), (0.78, 0.2), (0.76, 0.1)], 0.25),
    ],
)
def test_the_weight_halves_where_fewer_tasks_are_solved_at_a_lower_price(
    looks: list[tuple[float, float]], weight: float
) -> None:
    """Whatever is resumed on the way."""
    state = CollectorState()
    for pass_rate, price in looks:
        state.price = state.price.after(pass_rate, price, max_fall=0.01)
        state = CollectorState(**asdict(state))
    assert isinstance(state.price, PriceState)
    assert state.price.weight == weight


def test_the_price_is_that_of_solved_sessions() -> None:
    dear, free = RewardBreakdown(1.0, {"length": -0.01}), RewardBreakdown(1.0)
    failed = RewardBreakdown(0.0, {"length": -1.0})
    sessions = [make_trajectory(n, reward=reward) for n, reward in enumerate((dear, free, failed, None))]
    assert measure_price(sessions, RewardConfig()) == (pytest.approx(2 / 3), pytest.approx(0.005, rel=0.02))
    assert measure_price(sessions[2:], RewardConfig()) == (0.0, 0.0)
