"""Native norms and gates equal the float64 formulae, forward and backward, for all shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.model import fused
from etude.model.kernels.native import training

pytestmark = pytest.mark.skipif(
    not training.computes(torch.zeros(1)), reason="no compiler, or vectors too narrow to gain"
)
_ROWS = st.integers(0, 40) | st.sampled_from([127, 128, 129, 300])
_WIDTH = st.integers(1, 70)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _compare(function: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Values and gradients of `function` in float32 beside those of `plain` in float64."""
    narrow = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours, theirs = function(*narrow), plain(*wide)
    weight = _normal(*theirs.shape, seed=9)
    gradients = torch.autograd.grad((ours * weight).sum(), narrow)
    expected = torch.autograd.grad((theirs * weight.double()).sum(), wide)
    for a, b in zip((ours, *gradients), (theirs, *expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * (1 + len(inputs[0]) ** 0.5))


@given(_ROWS, st.integers(0, 3), _WIDTH, st.booleans())
def test_norms_of_parts_of_rows(rows: int, heads: int, width: int, as_engine: bool) -> None:
    shape = (rows, heads + 2, width) if heads else (rows, width + 3)
    x = _normal(*shape) + 0.1
    part = x[:, 1 : 1 + heads] if heads else x[:, :width]
    _compare(
        lambda x, w: fused.rms_norm(x, w, 1e-3, as_engine=as_engine),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-3),
        [part, _normal(width, seed=1)],
    )


@given(_ROWS, _WIDTH, st.sampled_from([1.0, 60.0]), st.booleans())
def test_gates_side_by_side(rows: int, width: int, scale: float, as_engine: bool) -> None:
    gate, up = (_normal(rows, 2 * width) * scale).chunk(2, dim=-1)
    _compare(
        lambda gate, up: fused.silu_gate(gate, up, as_engine=as_engine),
        lambda gate, up: F.silu(gate) * up,
        [gate, up],
    )


@given(_ROWS, st.integers(1, 3), st.integers(1, 35))
def test_rotations_of_parts_of_rows(rows: int, heads: int, half: int) -> None:
    x = _normal(rows, heads + 2, 2 * half)[:, 1 : 1 + heads]
    tables = [_normal(rows, 1, 2 * half, seed=seed) for seed in (1, 2)]  # any: halves need not be alike

    def plain(x: Tensor) -> Tensor:
        cosine, signed_sine = (table.to(x.dtype) for table in tables)
        return x * cosine + x.roll(half, dims=-1) * signed_sine

    _compare(lambda x: fused.rotate(x, tables[0], tables[1], as_engine=True), plain, [x])


@given(_ROWS, _WIDTH)
def test_gates_with_a_scale(rows: int, width: int) -> None:
    opened, scale, back = _normal(rows, 2 * width), _normal(rows, 1, seed=1), _normal(rows, width, seed=2)
    to_scale = torch.empty(rows, 1)
    inner, to_opened = fused.scaled_gate_backward(back, opened, scale, to_scale)
    torch.testing.assert_close(inner, fused.scaled_gate(opened, scale), rtol=0, atol=0)
    wide = [opened.double().requires_grad_(), scale.double().requires_grad_()]
    gate, up = wide[0].chunk(2, dim=-1)
    exact = F.silu(gate) * up * wide[1]
    expected = torch.autograd.grad((exact * back.double()).sum(), wide)
    for a, b in zip((inner, to_opened, to_scale), (exact, *expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_more_threads_give_the_same_bits() -> None:
    x, weight = _normal(500, 3, 20).requires_grad_(), _normal(20, seed=1).requires_grad_()
    before = torch.get_num_threads()
    found: list[tuple[Tensor, ...]] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = fused.rms_norm(x, weight, 1e-5)
            found.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
