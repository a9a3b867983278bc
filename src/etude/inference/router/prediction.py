"""How much is left: the mean residual life of things whose lengths have a heavy tail.

The longer an agent's session (or an answer) has run, the longer it will probably go on: with lognormal or
Pareto lengths the expected rest *grows* with the age. So a session's rest is predicted from its age alone,
by the mean rest of those that reached that age before.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT_AT_MOST = 512.0
"""Samples that an old mean counts for: beyond that it forgets, so that it follows a changing load."""


@dataclass(slots=True)
class _Bucket:
    """Those that reached one age."""

    mean_rest: float
    weight: float


class ResidualMean:
    """Expected rest by age, learnt from finished lengths. Ages double from bucket to bucket.

    Before anything has been learnt at an age, the rest is `prior` or the age itself, whichever is more: what
    has lasted long lasts as long again (the rule of a Pareto tail of exponent 2).
    """

    def __init__(self, prior: float, first_age: float = 1.0, num_buckets: int = 24) -> None:
        """`prior`: mean length expected at the start; it counts for four samples, not more."""
        if prior <= 0.0 or first_age <= 0.0 or num_buckets < 1:
            raise ValueError(
                f"ResidualMean: all must be positive, received {(prior, first_age, num_buckets)}"
            )
        self._ages = [0.0, *(first_age * 2.0**n for n in range(num_buckets - 1))]
        self._buckets = [_Bucket(max(prior, age), 4.0) for age in self._ages]

    def learn(self, length: float) -> None:
        """Counts one finished length in, at every age that it reached."""
        for age, bucket in zip(self._ages, self._buckets, strict=True):
            if age > length:
                break
            bucket.weight = min(bucket.weight + 1.0, _WEIGHT_AT_MOST)
            bucket.mean_rest += (length - age - bucket.mean_rest) / bucket.weight

    def rest(self, age: float) -> float:
        """Expected rest of what has this age; never negative."""
        upper = next((n for n, start in enumerate(self._ages) if start > age), None)
        if upper is None:
            return max(self._buckets[-1].mean_rest, 0.0)
        low, high = self._ages[upper - 1], self._ages[upper]
        share = (age - low) / (high - low)
        before, after = self._buckets[upper - 1].mean_rest, self._buckets[upper].mean_rest
        return max((1.0 - share) * before + share * after, 0.0)
