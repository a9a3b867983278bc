"""Corrections, divergences and the effective sample size against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.algorithms.divergence import k1, k2, k3
from etude.algorithms.effective_size import effective_sample_share
from etude.algorithms.geometric_mask import geometric_mask
from etude.algorithms.icepop import token_mask
from etude.algorithms.tis import truncated_weights
from tests.algorithms import references

_PAIRS = st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.integers(0, 3)), min_size=1, max_size=20)


def _rows(pairs: list[tuple[float, float, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    proximal, rollout, numbers = (torch.tensor(c) for c in zip(*pairs, strict=True))
    return proximal.double(), rollout.double(), numbers.unique(return_inverse=True)[1]


@settings(deadline=None)
@given(_PAIRS, st.floats(0.1, 10))
def test_truncated_weights_are_the_ratio_up_to_the_cap(
    pairs: list[tuple[float, float, int]], cap: float
) -> None:
    proximal, rollout, _ = _rows(pairs)
    weights = truncated_weights(proximal.requires_grad_(), rollout, cap)
    assert not weights.requires_grad
    expected = references.tis(proximal.tolist(), rollout.tolist(), cap)
    assert weights.tolist() == pytest.approx(expected, rel=1e-9)


@settings(deadline=None)
@given(_PAIRS)
def test_the_token_mask_has_two_sides(pairs: list[tuple[float, float, int]]) -> None:
    proximal, rollout, _ = _rows(pairs)
    expected = references.icepop(proximal.tolist(), rollout.tolist(), 0.5, 5.0)
    assert token_mask(proximal, rollout, 0.5, 5.0).tolist() == expected


@settings(deadline=None)
@given(_PAIRS)
def test_the_sequence_mask_looks_at_the_geometric_mean(pairs: list[tuple[float, float, int]]) -> None:
    proximal, rollout, sequence = _rows(pairs)
    expected = references.geometric(proximal.tolist(), rollout.tolist(), sequence.tolist(), 0.9, 1.2)
    assert geometric_mask(proximal, rollout, sequence, 0.9, 1.2).tolist() == expected


def test_length_alone_masks_no_sequence() -> None:
    sequence = torch.tensor([0] + [1] * 5000)
    gaps = torch.full((5001,), 0.005)
    assert geometric_mask(gaps, torch.zeros(5001), sequence, 0.99, 1.01).all()


@settings(deadline=None)
@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative_and_zero_only_for_equals(a: float, b: float) -> None:
    value = float(k3(torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)))
    assert value == pytest.approx(references.k3(a, b), rel=1e-9, abs=1e-12)
    assert value >= -1e-15
    assert value == 0.0 or a != b


def test_k1_and_k3_estimate_the_divergence_and_k2_has_its_gradient() -> None:
    """Expectations over a distribution of six tokens, exactly."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn((2, 6), generator=generator, dtype=torch.float64)
    logits = logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    fixed = policy.detach().exp()
    for estimator in (k1, k3):
        torch.testing.assert_close((fixed * estimator(policy, reference)).sum(), divergence)
    (gradient,) = torch.autograd.grad((fixed * k2(policy, reference)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    in_advantage = (fixed * k1(policy, reference).detach() * policy).sum()
    (gradient,) = torch.autograd.grad(in_advantage, logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    (gradient,) = torch.autograd.grad((fixed * k1(policy, reference)).sum(), logits)
    assert gradient.abs().max() < 1e-12, "as a loss k1 pulls nowhere"


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_divergences_pass_gradcheck(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    policy = -torch.rand(20, dtype=torch.float64)
    reference = -torch.rand(20, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: estimator(p, reference), (policy.requires_grad_(),))


@given(st.lists(st.floats(1e-8, 1e8), min_size=1, max_size=20))
def test_the_effective_share_is_its_formula_and_lies_between_one_of_many_and_all(
    weights: list[float],
) -> None:
    share = effective_sample_share(torch.tensor(weights, dtype=torch.float64))
    total, squares = math.fsum(weights), math.fsum(w * w for w in weights)
    assert share == pytest.approx(total**2 / (len(weights) * squares), rel=1e-6)
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
