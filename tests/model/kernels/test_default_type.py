"""What native kernels write is float32, whatever type PyTorch gives to new tensors: they would write beyond
the end of narrower ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.model.kernels.native import calls, find_compiler, mixture, pointwise, training
from etude.model.kernels.native.matrices import pack

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _same_type_after() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def attention() -> list[Tensor]:
    x, starts = values(9, 2, 10), np.array([0, 9])
    out, log_sums = training.attend(x, x, x, starts)
    return [out, log_sums, *training.attend_backward(x, x, x, x, out, log_sums, starts)]


def pages() -> list[Tensor]:
    x = values(9, 2, 10)
    return list(calls.PackedPages([9]).attend(x, x, x))


def norms() -> list[Tensor]:
    x, weight = values(9, 10), values(10)
    out, inverse = pointwise.rms_norm(x, weight, 1e-6)
    return [out, inverse, *pointwise.rms_norm_backward(x, x, weight, inverse)]


def rotations_and_gates() -> list[Tensor]:
    x, table = values(9, 1, 10), values(9, 1, 10)
    gates = [pointwise.silu_gate(x[:, 0], x[:, 0]), *pointwise.silu_gate_backward(x[:, 0], x[:, 0], x[:, 0])]
    return [pointwise.rotate(x, table, table), *gates]


def experts() -> list[Tensor]:
    x, gate_up, down, weights = values(9, 10), values(3, 10, 8), values(3, 4, 10), values(9, 2)
    chosen = torch.tensor([[0, 2]]).expand(9, 2)
    out, made = mixture.mix(x, gate_up, down, chosen, weights, as_engine=False)
    to_gate_up, to_down = torch.empty_like(gate_up), torch.empty_like(down)
    return [out, *mixture.mix_backward(x, made, gate_up, down, to_gate_up, to_down), to_gate_up, to_down]


def rows() -> list[Tensor]:
    x, tokens = values(9, 10), torch.arange(9)
    return [calls.linear(pack([values(10, 6)]), x, 1), calls.softmax(x, 1), *calls.choose_tokens(x, tokens)]


@pytest.mark.parametrize("function", [attention, pages, norms, rotations_and_gates, experts, rows])
def test_results_are_float32_whatever_type_new_tensors_have(function: Callable[[], list[Tensor]]) -> None:
    expected = function()
    torch.set_default_dtype(torch.float64)  # wider: what writes to a tensor of this type does no harm
    for ours, theirs in zip(function(), expected, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
