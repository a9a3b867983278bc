"""The GPU's arithmetic beside PyTorch's: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from etude.model import PackedAttention, TorchOps
from etude.model.kernels.gpu.experts import mix_few_rows
from etude.model.kernels.gpu.ops import GpuOps
from etude.model.kernels.gpu.pointwise import rotate, silu_gate
from tests.model.builders import random_tokens, small_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mixture(num_rows: int, experts: int = 5, width: int = 72, inner: int = 40, top_k: int = 3) -> tuple:
    gate_up, down = normal(experts, width, 2 * inner, seed=1), normal(experts, inner, width, seed=2)
    scores = normal(num_rows, experts, seed=3).softmax(-1)
    weights, chosen = scores.topk(top_k, dim=-1)
    return normal(num_rows, width), gate_up / 8, down / 8, chosen, weights


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_few_rows_are_mixed_as_the_reference_mixes_them(num_rows: int) -> None:
    given = mixture(num_rows)
    assert torch.allclose(mix_few_rows(*given), TorchOps().experts(*given), atol=1e-5, rtol=1e-5)


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    x, gate_up, down, chosen, weights = mixture(4, top_k=2)
    chosen = chosen.clamp(max=3)
    chosen[:, 0], chosen[:, 1] = 2, 0
    expected = mix_few_rows(x, gate_up, down, chosen, weights)
    gate_up[[1, 3, 4]], down[[1, 3, 4]] = float("nan"), float("nan")
    assert torch.equal(mix_few_rows(x, gate_up, down, chosen, weights), expected)


def test_a_rows_mixture_does_not_depend_on_the_other_rows() -> None:
    x, gate_up, down, chosen, weights = mixture(12)
    together = mix_few_rows(x, gate_up, down, chosen, weights)
    x = x.clone()
    x[1:] = float("nan")
    assert torch.equal(mix_few_rows(x, gate_up, down, chosen, weights)[0], together[0])


def test_pointwise_kernels_take_strided_rows() -> None:
    both = normal(3, 2 * 1100)
    gate, up = both.chunk(2, dim=-1)
    assert torch.allclose(silu_gate(gate, up), TorchOps().silu_gate(gate, up), atol=1e-6)
    x, table = normal(3, 5, 24)[:, 1:4], normal(3, 1, 24, seed=1)
    sine = normal(3, 1, 24, seed=2)
    assert torch.allclose(rotate(x, table, sine), TorchOps().rotate(x, table, sine), atol=1e-6)


def test_a_model_has_the_same_states_and_gradients_with_either_arithmetic() -> None:
    model = small_model(1).to(DEVICE)
    tokens = torch.from_numpy(random_tokens(30).astype("int64")).to(DEVICE)
    positions = torch.arange(30, device=DEVICE)
    results = []
    for ops in (TorchOps(), GpuOps()):
        model.ops = ops
        attention = ops.packed_attention(PackedAttention([30], device=DEVICE))
        with torch.no_grad():
            plain = model.logits(model(tokens, positions, attention))
        model.zero_grad()
        logits = model.logits(model(tokens, positions, attention))
        logits.logsumexp(-1).mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert torch.allclose(plain, logits, atol=1e-4)
        results.append([plain, *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)
