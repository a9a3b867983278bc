"""The loss that a configuration names, against the same written out token by token in double precision."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config import RlConfig
from etude.training.loss import Rows, policy_loss
from tests.algorithms import references
from tests.training.builders import rl_config

COUNT = 24
KINDS = ["clip", "cispo", "gspo", "decoupled"]
CORRECTIONS: dict[str, dict[str, float]] = {
    "none": {},
    "tis": {"tis_cap": 1.2},
    "icepop": {"token_low": 0.8, "token_high": 1.3},
    "sequence": {"sequence_low": 0.95, "sequence_high": 1.1},
    "all": {"tis_cap": 1.2, "token_low": 0.8, "sequence_high": 1.1},
}


def _rows(seed: int, with_proximal: bool) -> tuple[torch.Tensor, Rows, torch.Tensor]:
    """Present log-probabilities, rows, reference log-probabilities; all float64."""
    generator = torch.Generator().manual_seed(seed)

    def near(values: torch.Tensor, spread: float) -> torch.Tensor:
        return values + spread * torch.randn(COUNT, generator=generator, dtype=torch.float64)

    rollout = -torch.rand(COUNT, generator=generator, dtype=torch.float64)
    proximal = near(rollout, 0.2)
    present = near(proximal, 0.3)
    rows = Rows(
        rollout,
        proximal if with_proximal else None,
        near(torch.zeros(COUNT, dtype=torch.float64), 1.0),
        torch.rand(COUNT, generator=generator, dtype=torch.float64),
        torch.arange(COUNT) // 5,
        torch.arange(COUNT),
    )
    return present, rows, near(rollout, 0.4)


def _written_out(config: RlConfig, present: Any, rows: Rows, reference: Any) -> float:
    loss, fix = config.loss, config.loss.correction
    new, rollout = present.tolist(), rows.rollout.tolist()
    proximal = new if rows.proximal is None else rows.proximal.tolist()
    advantages, sequence = rows.advantages.tolist(), rows.sequence.tolist()
    anchor = proximal if fix.enabled or loss.kind == "decoupled" else rollout
    bounds = loss.gspo_clip_low, loss.gspo_clip_high
    per_token = {
        "clip": lambda: references.clip(new, anchor, advantages),
        "cispo": lambda: references.cispo(new, anchor, advantages),
        "gspo": lambda: references.gspo(new, anchor, advantages, sequence, *bounds),
        "decoupled": lambda: references.clip(new, anchor, advantages),
    }[loss.kind]()
    cap = fix.tis_cap or (math.inf if loss.kind == "decoupled" else None)
    total = 0.0
    weights = references.tis(proximal, rollout, cap) if cap is not None else [1.0] * COUNT
    token = references.icepop(proximal, rollout, fix.token_low, fix.token_high or math.inf)
    whole = references.geometric(proximal, rollout, sequence, fix.sequence_low, fix.sequence_high or math.inf)
    for i, weight in enumerate(rows.weights.tolist()):
        value = weights[i] * per_token[i] if token[i] and whole[i] else 0.0
        gap = new[i] - reference.tolist()[i]
        penalty = {"k1": gap * new[i], "k2": gap**2 / 2, "k3": math.exp(-gap) - 1 + gap}[loss.kl]
        ratio = min(references.ratio(new[i], rollout[i]), fix.tis_cap or math.inf)
        total += weight * (value + loss.kl_weight * ratio * penalty)
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_combination_is_its_formula(kind: str, correction: str) -> None:
    for seed, (kl, with_proximal) in enumerate(product(["k1", "k2", "k3"], [False, True])):
        changes = {"kind": kind, "cispo_cap": references.CAP, "correction": CORRECTIONS[correction]}
        config = rl_config({**changes, "kl": kl, "kl_weight": 0.3})
        present, rows, reference = _rows(seed, with_proximal)
        result = policy_loss(config, present, rows, reference)
        expected = _written_out(config, present, rows, reference)
        assert float(result.total) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_price_of_divergence_has_its_gradient_whoever_sampled_and_whatever_is_masked(
    kind: str, kl: str
) -> None:
    """Expectations over six tokens that another policy draws, exactly."""
    logits, other, sampler = torch.randn(
        (3, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    logits = logits.requires_grad_()
    present, reference, rollout = (values.log_softmax(-1) for values in (logits, other, sampler))
    zeros = torch.zeros(6, dtype=torch.float64)
    rows = Rows(rollout, None, zeros, rollout.exp(), zeros.long(), torch.arange(6))
    config = rl_config({"kind": kind, "kl": kl, "kl_weight": 1.0, "correction": {"token_high": 1.01}})
    result = policy_loss(config, present, rows, reference)
    assert bool(result.masked.any())
    forward = (reference.exp() * (reference - present)).sum()
    wanted = forward if kl == "k3" else (present.exp() * (present - reference)).sum()
    (expected,) = torch.autograd.grad(wanted, logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result.total, logits)[0], expected)


def test_a_masked_token_has_no_gradient_and_the_rest_keeps_its_own() -> None:
    config = rl_config({"kind": "clip", "correction": CORRECTIONS["icepop"]})
    present, rows, _ = _rows(0, with_proximal=True)
    leaf = present.requires_grad_()
    result = policy_loss(config, leaf, rows)
    (gradient,) = torch.autograd.grad(result.total, leaf)
    assert 0 < int(result.masked.sum()) < COUNT
    assert not bool(gradient[result.masked].any())
    plain = policy_loss(rl_config({"kind": "clip", "correction": {"tis_cap": 1e9}}), leaf, rows)
    assert not bool(plain.masked.any())


def test_a_mask_swallows_what_is_not_finite() -> None:
    """A token so far off that it is masked must not poison the sum."""
    config = rl_config({"kind": "decoupled", "correction": {"token_high": 5.0}})
    present, rows, _ = _rows(0, with_proximal=True)
    rows.rollout[3] = -1e30
    leaf = present.requires_grad_()
    result = policy_loss(config, leaf, rows)
    (gradient,) = torch.autograd.grad(result.total, leaf)
    assert bool(result.masked[3]) and bool(result.total.isfinite()) and bool(gradient.isfinite().all())


def test_when_all_tokens_are_masked_the_loss_is_nothing() -> None:
    config = rl_config({"kind": "clip", "correction": {"token_high": 1.01}})
    present, rows, _ = _rows(1, with_proximal=False)
    rows.rollout.sub_(3.0)
    leaf = present.requires_grad_()
    result = policy_loss(config, leaf, rows)
    result.total.backward()
    assert float(result.total.detach()) == 0.0
    assert bool(result.masked.all())


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2**31))
def test_in_the_first_update_the_present_policy_is_the_proximal_one(kind: str, seed: int) -> None:
    config = rl_config({"kind": kind, "correction": {"tis_cap": 2.0}})
    present, rows, _ = _rows(seed, with_proximal=False)
    named = Rows(rows.rollout, present.detach(), rows.advantages, rows.weights, rows.sequence, rows.places)
    leaf = present.requires_grad_()
    gradients = [
        torch.autograd.grad(policy_loss(config, leaf, given).total, leaf)[0] for given in (rows, named)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
