"""Native attention equals the padded float64 reference, forward and backward, for all shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.model import PackedAttention, flash
from etude.model.kernels.native import training

pytestmark = pytest.mark.skipif(
    not training.computes(torch.zeros(1)), reason="no compiler, or vectors too narrow to gain"
)


@dataclass(frozen=True)
class _Shape:
    lengths: list[int]
    kv_heads: int
    group: int
    dim: int
    value_dim: int


@st.composite
def _shapes(draw: st.DrawFn) -> _Shape:
    lengths = sorted(draw(st.lists(st.integers(1, 150), min_size=1, max_size=5)), reverse=True)
    dim = draw(st.integers(1, 40) | st.sampled_from([64, 96, 130]))
    value_dim = draw(st.just(dim) | st.integers(1, dim))
    return _Shape(lengths, draw(st.integers(1, 3)), draw(st.integers(1, 3)), dim, value_dim)


def _inputs(shape: _Shape, seed: int = 0) -> list[Tensor]:
    """Query, key and value; each a part of wider rows, as a model cuts them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((shape.kv_heads * shape.group, shape.dim), (shape.kv_heads, shape.dim))
    parts = [*sizes, (shape.kv_heads, shape.value_dim)]
    rows = [torch.randn((sum(shape.lengths), heads + 1, dim), generator=generator) for heads, dim in parts]
    return [row[:, 1:].detach().requires_grad_() for row in rows]


def _results(shape: _Shape, inputs: list[Tensor]) -> list[Tensor]:
    """Values, and gradients of a weighted sum of them."""
    attention = PackedAttention(shape.lengths)
    out = attention.attend(0, *inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)]


@given(_shapes())
def test_values_and_gradients_are_those_in_float64(shape: _Shape) -> None:
    inputs = _inputs(shape)
    exact = _results(shape, [x.detach().double().requires_grad_() for x in inputs])
    for ours, theirs in zip(_results(shape, inputs), exact, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max() + 1)
        )


def test_gradients_are_finite_differences() -> None:
    shape = _Shape([70, 9], 2, 2, 20, 12)
    inputs = _inputs(shape)
    starts = np.array([0, 70, 79])
    weight = torch.randn((79, 4, 12), generator=torch.Generator().manual_seed(5))

    def value(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (flash.attend(query, key, value, starts).double() * weight).sum()

    gradients = torch.autograd.grad(value(*inputs), inputs)
    for which, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(which))
        moved = [
            value(*(x.detach() + sign * 1e-2 * direction if i == which else x for i, x in enumerate(inputs)))
            for sign in (1, -1)
        ]
        slope = (moved[0] - moved[1]).detach() / 2e-2
        assert float(slope) == pytest.approx(float((gradient.double() * direction).sum()), rel=5e-3, abs=5e-3)


def test_more_threads_give_the_same_bits() -> None:
    shape = _Shape([90, 90, 41, 7, 1], 2, 2, 16, 16)
    before = torch.get_num_threads()
    try:
        found: list[list[Tensor]] = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(_results(shape, _inputs(shape)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_results_that_nobody_takes_change_no_bit_of_the_others() -> None:
    shape = _Shape([90, 90, 41, 7, 1], 4, 2, 16, 16)
    starts, unused = np.cumsum([0, *shape.lengths]), np.array([0, 61, 24, 6, 0])
    used = torch.cat(
        [torch.arange(a + n, a + m) for a, n, m in zip(starts[:-1], unused, shape.lengths, strict=True)]
    )
    found: list[list[Tensor]] = []
    for skipped in (None, unused):
        inputs = _inputs(shape)
        out = flash.attend(*inputs, starts, skipped)[used]
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_large_scores_stay_finite() -> None:
    shape = _Shape([80], 1, 1, 16, 16)
    inputs = [(x.detach() * 200).requires_grad_() for x in _inputs(shape)]
    for ours in _results(shape, inputs):
        assert bool(ours.isfinite().all())


def test_a_gradient_has_no_gradient() -> None:
    query, key, value = _inputs(_Shape([5], 1, 1, 8, 8))
    out = flash.attend(query, key, value, np.array([0, 5]))
    (gradient,) = torch.autograd.grad(out.square().sum(), value, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
