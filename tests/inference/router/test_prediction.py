"""Prediction of a request's remaining length from its age."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.router.policy import ResidualMean


def test_the_rest_of_a_heavy_tail_grows_with_age() -> None:
    generator = np.random.default_rng(0)
    lengths = 40.0 * np.exp(generator.standard_normal(4000))
    residual = ResidualMean(prior=10.0)
    for length in lengths:
        residual.observe(float(length))
    for age in (16.0, 64.0, 256.0):
        true = float((lengths[lengths >= age] - age).mean())
        assert residual.predict(age) == pytest.approx(true, rel=0.25)
    assert residual.predict(16.0) < residual.predict(64.0) < residual.predict(256.0)


def test_the_rest_of_constant_lengths_shrinks_with_age() -> None:
    residual = ResidualMean(prior=10.0)
    for _ in range(300):
        residual.observe(100.0)
    assert residual.predict(0.0) == pytest.approx(100.0, rel=0.05)
    assert residual.predict(64.0) < residual.predict(32.0) < residual.predict(0.0)


def test_old_lengths_are_forgotten() -> None:
    residual = ResidualMean(prior=10.0)
    for length in [1000.0] * 2000 + [10.0] * 4000:
        residual.observe(length)
    assert residual.predict(0.0) < 15.0


@given(
    lengths=st.lists(st.floats(0.0, 1e7), max_size=50),
    age=st.floats(0.0, 1e9),
)
def test_the_rest_is_never_negative(lengths: list[float], age: float) -> None:
    residual = ResidualMean(prior=5.0)
    for length in lengths:
        residual.observe(length)
    assert residual.predict(age) >= 0.0


def test_a_prior_must_be_positive() -> None:
    with pytest.raises(AssertionError, match="positive"):
        ResidualMean(prior=0.0)
