"""Each loss against its formula, written out token by token in double precision, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.algorithms.cispo import cispo
from etude.algorithms.clip import clipped_surrogate
from etude.algorithms.decoupled import decoupled
from etude.algorithms.gspo import gspo
from etude.algorithms.rejection import rejection_sampling
from etude.algorithms.terms import LossTerms, importance_ratio
from tests.algorithms import references
from tests.algorithms.references import CAP, HIGH, LOW

GSPO_LOW, GSPO_HIGH = 0.1, 0.15


@dataclass
class Case:
    """Tokens of some sequences; all [N] float64."""

    new: Tensor
    old: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequence: Tensor


Loss = Callable[[Tensor, Case], LossTerms]
LOSSES: dict[str, Loss] = {
    "cispo": lambda new, case: cispo(new, case.old, case.advantages, CAP),
    "clip": lambda new, case: clipped_surrogate(new, case.old, case.advantages, LOW, HIGH),
    "gspo": lambda new, case: gspo(new, case.old, case.advantages, case.sequence, GSPO_LOW, GSPO_HIGH),
    "decoupled": lambda new, case: decoupled(new, case.old, case.behaviour, case.advantages, LOW, HIGH),
    "rejection": lambda new, case: rejection_sampling(new, case.old, case.advantages),
}


def _expected(name: str, case: Case) -> list[float]:
    new, old, behaviour, advantages, sequence = (
        values.tolist() for values in (case.new, case.old, case.behaviour, case.advantages, case.sequence)
    )
    match name:
        case "cispo":
            return references.cispo(new, old, advantages)
        case "clip":
            return references.clip(new, old, advantages)
        case "gspo":
            return references.gspo(new, old, advantages, sequence, GSPO_LOW, GSPO_HIGH)
        case "decoupled":
            return references.decoupled(new, old, behaviour, advantages)
        case _:
            return [-a * n for a, n in zip(advantages, new, strict=True)]


def _case(seed: int = 0, count: int = 200, spread: float = 1.0) -> Case:
    """Ratios of about e^+-spread, away from the bounds; sequences of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.01
    new = old + spread * torch.randn(count, generator=generator, dtype=torch.float64)
    behaviour = old + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    advantages[::17] = 0.0
    ratio = (new - old).exp()
    for bound in (CAP, 1 - LOW, 1 + HIGH):
        new = torch.where((ratio - bound).abs() < 1e-3, new + 0.01, new)
    lengths = torch.randint(1, 10, (count,), generator=generator)
    sequence = torch.arange(count).repeat_interleave(lengths)[:count]
    return Case(new, old, behaviour, advantages, sequence)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_its_formula(name: str) -> None:
    case = _case()
    terms = LOSSES[name](case.new, case)
    torch.testing.assert_close(terms.per_token.tolist(), _expected(name, case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["clip", "gspo", "decoupled", "rejection"])
def test_every_gradient_agrees_with_finite_differences(name: str) -> None:
    case = _case(1, 40, 0.2)
    new = case.new.requires_grad_()
    assert torch.autograd.gradcheck(lambda values: LOSSES[name](values, case).per_token, (new,))


def test_cispos_gradient_agrees_with_finite_differences_at_a_fixed_weight() -> None:
    case = _case(1, 40)
    new = case.new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES["cispo"](new, case).per_token.sum(), new)
    weight, step = importance_ratio(case.new, case.old).clamp(max=CAP), 1e-6
    for i in range(40):
        fixed = -float(weight[i] * case.advantages[i])
        value = case.new[i].item()
        slope = (fixed * (value + step) - fixed * (value - step)) / (2 * step)
        assert float(gradient[i]) == pytest.approx(slope, abs=1e-6)


def test_every_token_keeps_a_gradient_under_cispo() -> None:
    case = _case()
    new = case.new.requires_grad_()
    terms = LOSSES["cispo"](new, case)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), new)
    assert bool((gradient[case.advantages != 0] != 0).all())
    ratio = importance_ratio(case.new.detach(), case.old)
    assert terms.clipped.tolist() == (ratio > CAP).tolist()
    assert 0 < terms.clipped.sum() < len(ratio)


@pytest.mark.parametrize("name", ["clip", "decoupled"])
def test_the_clipped_surrogates_are_flat_exactly_where_they_clip(name: str) -> None:
    case = _case(3, 60)
    new = case.new.requires_grad_()
    terms = LOSSES[name](new, case)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), new)
    ratio = importance_ratio(case.new.detach(), case.old)
    beyond = ((ratio > 1 + HIGH) & (case.advantages > 0)) | ((ratio < 1 - LOW) & (case.advantages < 0))
    assert terms.clipped.tolist() == beyond.tolist()
    assert (gradient == 0).tolist() == (beyond | (case.advantages == 0)).tolist()
    assert 0 < terms.clipped.sum() < len(terms.clipped)


def test_gspo_clips_whole_sequences_and_spreads_their_gradient_evenly() -> None:
    case = _case(4, 60)
    case.advantages = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[
        case.sequence
    ]
    new = case.new.requires_grad_()
    terms = LOSSES["gspo"](new, case)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), new)
    for number in case.sequence.unique():
        rows = case.sequence == number
        for values in (terms.clipped, terms.ratio, gradient):
            assert len(values[rows].unique()) == 1
    assert 0 < terms.clipped.sum() < 60


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    case = _case(4)
    case.old = case.behaviour = case.new.clone()
    case.advantages = case.advantages[case.sequence]
    new = case.new.requires_grad_()
    terms = LOSSES[name](new, case)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), new)
    torch.testing.assert_close(gradient, -case.advantages)
    assert not terms.clipped.any()
    assert not terms.ratio.requires_grad
    assert terms.ratio.tolist() == [1.0] * len(new)


_LOG = st.floats(-20, 0)
_TOKEN = st.tuples(_LOG, _LOG, _LOG, st.sampled_from([-2.5, -1.0, 0.0, 1e-3, 1.0]), st.integers(0, 3))


@settings(deadline=None)
@given(st.lists(_TOKEN, min_size=1, max_size=12), st.sampled_from(sorted(LOSSES)), st.booleans())
def test_losses_and_gradients_are_finite_and_right_at_ratios_of_e_to_the_20(
    tokens: list[tuple[float, float, float, float, int]], name: str, single: bool
) -> None:
    """In both number formats, for one token and for many, all masked (advantage 0) or none."""
    columns = [list(column) for column in zip(*tokens, strict=True)]
    new, old, behaviour, advantages = (torch.tensor(c, dtype=torch.float64) for c in columns[:4])
    _, sequence = torch.tensor(columns[4]).unique(return_inverse=True)
    case = Case(new, old, behaviour, advantages, sequence)
    expected = _expected(name, case)
    if single:
        case = Case(new.float(), old.float(), behaviour.float(), advantages.float(), sequence)
    leaf = case.new.clone().requires_grad_()
    terms = LOSSES[name](leaf, case)
    torch.testing.assert_close(
        terms.per_token.tolist(), expected, rtol=1e-4 if single else 1e-9, atol=1e-5 if single else 1e-9
    )
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), leaf)
    assert bool(gradient.isfinite().all())
    masked = case.advantages == 0
    if name != "gspo":
        assert not bool(gradient[masked].any())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_beyond_the_limit_losses_stay_finite(name: str, gap: float) -> None:
    for advantage in (-1.0, 0.0, 1.0):
        old = torch.tensor([-1.0])
        new = (old + gap).requires_grad_()
        case = Case(new, old, old - gap, torch.tensor([advantage]), torch.tensor([0]))
        terms = LOSSES[name](new, case)
        (gradient,) = torch.autograd.grad(terms.per_token.sum(), new)
        assert bool(terms.per_token.isfinite().all() and gradient.isfinite().all())


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_have_no_loss(name: str) -> None:
    empty = torch.zeros(0)
    case = Case(empty, empty, empty, empty, torch.zeros(0, dtype=torch.int64))
    assert partial(LOSSES[name], empty)(case).per_token.shape == (0,)
