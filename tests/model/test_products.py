"""Products of the training step, in whatever order the operands lie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.model import products
from etude.model.kernels.native import calls, find_compiler, training
from etude.model.kernels.native.matrices import pack

_SIZES = st.integers(1, 90) | st.sampled_from([127, 256, 300, 513])
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
needs_native = pytest.mark.skipif(
    not training.computes(torch.zeros(1)), reason="no compiler, or vectors too narrow to gain"
)


def _matrix(rows: int, columns: int, turned: bool, seed: int) -> Tensor:
    """Values of a wider matrix, so that rows have gaps."""
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows + 3) if turned else (rows, columns + 3)
    wide = torch.randn(shape, generator=generator)
    return wide[:, :rows].t() if turned else wide[:, :columns]


@needs_native
@given(_SIZES, _SIZES, _SIZES, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 2, 3]))
def test_a_product_is_that_in_float64(
    rows: int, depth: int, columns: int, left: bool, right: bool, add: bool, threads: int
) -> None:
    a, b = _matrix(rows, depth, left, 0), _matrix(depth, columns, right, 1)
    out = torch.randn((rows, columns + 5), generator=torch.Generator().manual_seed(2))[:, :columns]
    expected = a.double() @ b.double() + (out.double() if add else 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        training.multiply(a, b, out, add=add)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * depth**0.5)


def test_factors_to_be_rounded_are_multiplied_by_pytorch_also_where_ours_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "_outruns_mkl", lambda: True)
    found: list[bool] = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            found.append(training.multiplies(torch.ones(1)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == [True, False]


@needs_native
def test_neither_threads_nor_other_rows_change_a_bit() -> None:
    a, b = _matrix(301, 600, False, 0), _matrix(600, 130, True, 1)
    found: list[Tensor] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(training.multiply(a, b, torch.empty(301, 130)))
            found.append(training.multiply(a.t().contiguous().t(), b.contiguous(), torch.empty(301, 130)))
    finally:
        torch.set_num_threads(before)
    found.append(torch.cat([training.multiply(part, b, torch.empty(len(part), 130)) for part in a.split(77)]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_compiler
@given(_SIZES, _SIZES, _SIZES, st.sampled_from([1, 2]))
def test_weights_of_16_bits_give_the_bits_of_their_rounded_values(
    rows: int, depth: int, columns: int, threads: int
) -> None:
    a, b = _matrix(rows, depth, False, 0).contiguous(), _matrix(depth, columns, False, 1)
    rounded = calls.linear(pack([b.bfloat16().float()]), a, 1)
    assert torch.equal(calls.linear(pack([b], "bfloat16"), a, threads), rounded)


@needs_compiler
@given(_SIZES, _SIZES, _SIZES, st.booleans(), st.booleans(), st.sampled_from([1, 2, 3]))
def test_the_engines_product_has_its_bits_without_packed_weights(
    rows: int, depth: int, columns: int, left: bool, right: bool, threads: int
) -> None:
    a, b = _matrix(rows, depth, left, 0), _matrix(depth, columns, right, 1)
    expected = calls.linear(pack([b]), a.contiguous(), 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(products.engine_product(a, b), expected)
        out = torch.full((rows, columns + 5), torch.nan)
        products.engine_product(a, b, out[:, :columns])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out[:, :columns], expected)
    assert out[:, columns:].isnan().all(), "nothing is written behind a row's end"


@needs_compiler
def test_the_engines_order_is_not_that_of_the_fast_product() -> None:
    a, b = _matrix(40, 600, False, 0), _matrix(600, 64, False, 1)
    fast = training.multiply(a, b, torch.empty(40, 64))
    assert not torch.equal(products.engine_product(a, b), fast), "or the tests of bits would show nothing"


@needs_native
@pytest.mark.skipif(
    sys.platform != "linux" or "OpenMP" not in torch.__config__.parallel_info(), reason="threads of its own"
)
def test_products_run_on_the_threads_that_pytorch_has() -> None:
    tasks, before = Path("/proc/self/task"), torch.get_num_threads()
    x = torch.randn(600, 600)
    try:
        torch.set_num_threads(3)
        x.exp()
        num_threads = len(list(tasks.iterdir()))
        training.multiply(x, x, torch.empty(600, 600))
        assert len(list(tasks.iterdir())) == num_threads
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_a_linear_layer_of_each_head_has_the_gradients_of_pytorchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((40, 5, 60), generator=generator)[:, 1:4].requires_grad_()
    weight = torch.randn((3, 60, 70), generator=generator).transpose(1, 2).requires_grad_()
    results = products.per_head(x, weight), torch.einsum("thi,hoi->tho", x, weight)
    upstream = torch.randn((3, 40, 70), generator=generator).transpose(0, 1)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(out, (x, weight), upstream) for out in results]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    frozen = products.per_head(x, weight.detach())
    assert torch.equal(torch.autograd.grad(frozen, x, upstream)[0], gradients[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 70])
def test_a_linear_layer_has_the_gradients_of_pytorchs(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((40, size), (50, size), (40, 50))
    ]
    x, weight, residual = inputs
    results = (products.linear(x, weight, residual), torch.addmm(residual, x, weight.t()))
    upstream = torch.randn((40, 50), generator=generator).to(dtype)
    gradients = [torch.autograd.grad(out, inputs, upstream) for out in results]
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_linear_layer_computes_only_the_gradients_that_are_wanted() -> None:
    x, weight = torch.randn(40, 60), torch.randn(50, 60, requires_grad=True)
    products.linear(x, weight).sum().backward()
    assert weight.grad is not None and weight.grad.shape == weight.shape
    frozen = x.clone().requires_grad_()
    products.linear(frozen, weight.detach()).sum().backward()
    assert frozen.grad is not None and frozen.grad.shape == x.shape


def test_products_of_nothing_are_zeros() -> None:
    weight = torch.randn(50, 60, requires_grad=True)
    out = products.linear(torch.empty((0, 60)), weight)
    out.sum().backward()
    assert out.shape == (0, 50)
    assert weight.grad is not None and not weight.grad.any()
