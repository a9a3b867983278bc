"""Schedule of the weight of the price of solved sessions: halved when validation results fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.algorithms.advantages import session_price
from etude.config import RewardConfig
from etude.records import Trajectory

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class PriceState:
    """The weight, and the validation results that the next ones are compared with. Plain values."""

    weight: float = 1.0
    pass_rate: float | None = None
    """The best on the validation tasks since the weight changed last; None before the first validation."""
    price: float = 0.0
    """Mean price of the sessions that were solved in that validation."""

    def after(self, pass_rate: float, price: float, max_fall: float) -> PriceState:
        """The state after another validation: the weight is halved if the pass rate fell by more than
        `max_fall` while the price fell."""
        if self.pass_rate is None or pass_rate > self.pass_rate:
            return PriceState(self.weight, pass_rate, price)
        if self.pass_rate - pass_rate > max_fall + _ROUNDING and price < self.price:
            return PriceState(self.weight / 2, pass_rate, price)
        return self


def measure_price(sessions: Sequence[Trajectory], reward: RewardConfig) -> tuple[float, float]:
    """(share of graded sessions that were solved, mean price of those), 0 where there are none."""
    graded = [session.reward for session in sessions if session.reward is not None]
    prices = [session_price(solved, reward.most_price) for solved in graded if solved.task >= 1.0]
    return len(prices) / max(1, len(graded)), sum(prices) / max(1, len(prices))
