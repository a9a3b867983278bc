"""Draws follow the processed distribution, and their noise is a function of (key, position) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from etude.inference.sampling import hash_key, sample, uniforms
from etude.records import SamplingParams

_CHI_SQUARE_15_AT_1E_4 = 44.26
"""Quantile 0.9999 of chi-square with 15 degrees of freedom."""


def _draws(count: int, key: tuple[int, ...] = (1, 2)) -> NDArray[np.float64]:
    keys = np.full(count, hash_key(key), dtype=np.uint64)
    return uniforms(keys, np.arange(count))


def _logits(seed: int, rows: int = 1, vocab: int = 16) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 1.5


def _chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_match_the_distribution(temperature: float) -> None:
    count, logits = 20_000, _logits(0)
    tokens, logprobs = sample(
        logits.expand(count, -1), [SamplingParams(temperature=temperature)] * count, _draws(count)
    )
    expected = (logits[0].double() / temperature).softmax(-1)
    assert _chi_square(np.bincount(tokens.numpy(), minlength=16), expected.numpy()) < _CHI_SQUARE_15_AT_1E_4
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize("along", ["positions", "keys"])
def test_noise_is_uniform_along_positions_and_along_keys(along: str) -> None:
    count = 16_384
    if along == "positions":
        draws = _draws(count)
    else:
        keys = np.array([hash_key((0, n)) for n in range(count)], dtype=np.uint64)
        draws = uniforms(keys, np.zeros(count, dtype=np.int64))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    even = np.full(16, 1 / 16)
    assert _chi_square(np.bincount((draws * 16).astype(int), minlength=16), even) < _CHI_SQUARE_15_AT_1E_4
    pairs = (draws[:-1] * 4).astype(int) * 4 + (draws[1:] * 4).astype(int)
    assert _chi_square(np.bincount(pairs, minlength=16), even) < _CHI_SQUARE_15_AT_1E_4


@given(st.lists(st.integers(-(2**70), 2**70), max_size=5), st.integers(0, 10_000))
def test_noise_depends_on_the_key_and_the_position_and_on_no_other_row(key: list[int], position: int) -> None:
    hashed = np.array([7, hash_key(key), 9], dtype=np.uint64)
    among = uniforms(hashed, np.array([3, position, 8]))[1]
    alone = uniforms(hashed[1:2], np.array([position]))[0]
    assert among == alone
    assert alone != uniforms(hashed[1:2], np.array([position + 1]))[0]
    assert hash_key([*key, 0]) != hash_key(key)


def test_the_order_of_a_key_matters() -> None:
    assert len({hash_key(key) for key in ((), (0,), (0, 0), (1, 2), (2, 1), (-1,), (1,))}) == 7


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(top_k=2), {1, 3}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.5), {1, 3}),
        (SamplingParams(top_p=0.39), {3}),
        (SamplingParams(top_p=1e-9), {3}),
        (SamplingParams(min_p=0.5), {1, 3}),
        (SamplingParams(min_p=0.2), {0, 1, 2, 3}),
        (SamplingParams(top_k=4, top_p=0.85, min_p=0.3), {0, 1, 3}),
        (SamplingParams(temperature=0.25, top_p=0.7), {3}),
        (SamplingParams(), {0, 1, 2, 3, 4}),
    ],
)
def test_truncation_keeps_its_support_and_renormalises(params: SamplingParams, support: set[int]) -> None:
    probabilities = torch.tensor([0.16, 0.3, 0.1, 0.4, 0.04])
    count = 2_000
    tokens, logprobs = sample(probabilities.log().expand(count, -1), [params] * count, _draws(count))
    assert set(tokens.tolist()) == support
    kept = sorted(support)
    expected = torch.zeros(5)
    expected[kept] = (probabilities[kept].log() / params.temperature).softmax(-1)
    torch.testing.assert_close(logprobs.exp(), expected[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-300])
def test_a_temperature_near_zero_draws_the_likeliest_token(temperature: float) -> None:
    logits = _logits(3)
    tokens, logprobs = sample(logits, [SamplingParams(temperature=temperature)], np.array([0.999]))
    assert int(tokens[0]) == int(logits.argmax())
    assert float(logprobs[0]) == 0.0


@pytest.mark.parametrize("top_p", [1e-40, 1e-50, 1e-300])
def test_a_top_p_near_zero_keeps_the_likeliest_token(top_p: float) -> None:
    logits = _logits(3)
    tokens, logprobs = sample(logits, [SamplingParams(top_p=top_p)], np.array([0.999]))
    assert int(tokens[0]) == int(logits.argmax())
    assert float(logprobs[0]) == 0.0


def test_rows_with_different_parameters_do_not_disturb_each_other() -> None:
    logits = _logits(1, rows=5)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=1),
        SamplingParams(temperature=2.0),
        SamplingParams(top_p=0.3),
        SamplingParams(temperature=0.0),
    ]
    draws = _draws(5)
    tokens, logprobs = sample(logits, params, draws)
    for row, param in enumerate(params):
        token, logprob = sample(logits[row : row + 1], [param], draws[row : row + 1])
        assert tokens[row] == token[0]
        torch.testing.assert_close(logprobs[row], logprob[0])
    for row in (1, 4):
        assert tokens[row] == logits[row].argmax()
        torch.testing.assert_close(logprobs[row], logits[row].log_softmax(-1).max())


@given(st.floats(0.0, 1.0 - 2**-53), st.integers(0, 1000))
def test_no_draw_picks_a_token_of_probability_zero(draw: float, seed: int) -> None:
    logits = _logits(seed)
    logits[0, [0, 5, 15]] = float("-inf")
    tokens, logprobs = sample(logits, [SamplingParams()], np.array([draw]))
    assert int(tokens[0]) not in (0, 5, 15)
    assert bool(logprobs.isfinite().all())
