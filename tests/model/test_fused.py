"""Functions with hand-written gradients: values and gradients equal those of the plain formulae."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.model import fused
from etude.model.experts import mix_by_expert


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def _plain_rotation(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    return x * cosine + x.roll(x.shape[-1] // 2, dims=-1) * signed_sine


def _plain_mix(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows: list[Tensor] = []
    for row, experts, gates in zip(x, chosen, weights, strict=True):
        parts: list[Tensor] = []
        for expert, weight in zip(experts.tolist(), gates, strict=True):
            gate, up = (row @ gate_up[expert]).chunk(2)
            parts.append(weight * ((F.silu(gate) * up) @ down[expert]))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def _same(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    wanted = [x for x in inputs if x.requires_grad]
    results = [ours(*inputs), plain(*inputs)]
    weight = _normal(*results[0].shape, seed=9).detach()
    gradients = [torch.autograd.grad((out * weight).sum(), wanted) for out in results]
    torch.testing.assert_close(*results)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(5, 8), (4, 3, 6)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    inputs = [_normal(*shape), _normal(shape[-1], seed=1)]
    _same(lambda x, w: fused.rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, w.shape, w, 1e-3), inputs)
    assert torch.autograd.gradcheck(lambda x, w: fused.rms_norm(x, w, 1e-3), inputs)
    frozen = fused.rms_norm(inputs[0], inputs[1].detach(), 1e-3)
    assert torch.autograd.grad(frozen.sum(), inputs[0])[0].shape == shape


def test_norm_of_rows_of_zeros_has_finite_gradients() -> None:
    x = torch.zeros((2, 4), requires_grad=True)
    fused.rms_norm(x, torch.ones(4), 1e-6).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_rotation() -> None:
    tables = [_normal(5, 1, 6, seed=seed).detach() for seed in (1, 2)]
    _same(fused.rotate, _plain_rotation, [_normal(5, 3, 6), *tables])


def test_gated_silu() -> None:
    both = _normal(5, 12)
    _same(lambda x: fused.silu_gate(*x.chunk(2, -1)), lambda x: F.silu(x[:, :6]) * x[:, 6:], [both])


def _experts(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    chosen = torch.rand((7, 5), generator=torch.Generator().manual_seed(4)).topk(2).indices
    chosen[chosen == 3] = 0  # nobody chooses the fourth; one may be chosen twice
    weights = _normal(7, 2, seed=3, dtype=torch.float32 if dtype != torch.float64 else dtype)
    return [_normal(7, 4, dtype=dtype), _normal(5, 4, 6, seed=1, dtype=dtype),
            _normal(5, 3, 4, seed=2, dtype=dtype), chosen, weights]  # fmt: skip


def test_experts_one_by_one() -> None:
    _same(mix_by_expert, _plain_mix, _experts())


def test_experts_without_rows_have_gradients_of_zero() -> None:
    x, gate_up, down, chosen, weights = _experts()
    mix_by_expert(x, gate_up, down, chosen, weights).sum().backward()
    assert gate_up.grad is not None and down.grad is not None
    assert not gate_up.grad[3].any() and not down.grad[3].any()
    assert gate_up.grad[0].any() and down.grad[0].any()


def test_frozen_experts_get_no_gradient_and_their_rows_do() -> None:
    x, gate_up, down, chosen, weights = _experts()
    frozen = [gate_up.detach(), down.detach()]
    a = torch.autograd.grad(mix_by_expert(x, *frozen, chosen, weights).sum(), (x, weights))
    b = torch.autograd.grad(mix_by_expert(x, gate_up, down, chosen, weights).sum(), (x, weights))
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_keep_types_and_repeat_their_bits(dtype: torch.dtype) -> None:
    inputs = _experts(dtype)
    wanted = [x for x in inputs if x.requires_grad]
    runs: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        out = mix_by_expert(*inputs)
        runs.append((out, *torch.autograd.grad(out.float().sum(), wanted)))
    assert [x.dtype for x in runs[0]] == [dtype, dtype, dtype, dtype, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    exact = mix_by_expert(*(x.double() if x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.05)
