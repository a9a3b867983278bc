"""The trainer on a GPU: values and gradients against a CPU's, kernels against their references."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.config import OptimizerConfig, RunConfig
from etude.controller.compute import Place, choose_place, place_model
from etude.model import LanguageModel, PackedAttention, RouterStatistics
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.training.optimizer import Optimizer
from tests.inference.test_gpu_forward import LATENT
from tests.model.builders import random_tokens, small_model

LENGTHS = [50, 31, 30, 7]
CASES = pytest.mark.parametrize(
    "changes",
    [{"head_dim": 16}, {"head_dim": 16, "architecture": "qwen3"}, LATENT],
    ids=["mixture of experts", "dense", "latent attention"],
)


def placed(model: LanguageModel, dtype: str = "float32") -> LanguageModel:
    return place_model(copy.deepcopy(model), RunConfig(device="cuda", dtype=dtype))  # type: ignore[arg-type]


def gradients(model: LanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of packed sequences, and the gradient of their mean with a balance loss."""
    device = model.embedding.device
    batch = PackedSequences.pack([random_tokens(n, n) for n in LENGTHS], device)
    first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    first[batch.starts] = True
    targets = (~first).nonzero().flatten().to(device)
    statistics = RouterStatistics([], [])
    logprobs, _ = packed_logprobs(model, batch, targets, statistics=statistics)
    (logprobs.mean() + 0.1 * statistics.balance_loss()).backward()
    found = {name: p.grad.cpu().float() for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach().cpu(), found


def test_the_gpu_is_chosen_where_nothing_else_is_asked_for() -> None:
    assert choose_place() == Place("cuda", "bfloat16", "gpu")
    assert choose_place(kernels="eager").device == "cpu"
    model = placed(small_model(1), "bfloat16")
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert model.embedding.dtype == torch.bfloat16


@CASES
def test_gradients_are_those_of_a_cpu(changes: dict[str, Any]) -> None:
    model = small_model(1, **changes)
    expected, expected_gradients = gradients(copy.deepcopy(model))
    logprobs, found = gradients(placed(model))
    assert torch.allclose(logprobs, expected, atol=1e-4)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected_gradients[name], atol=1e-4, rtol=1e-3), name


def test_scores_are_those_of_a_cpu() -> None:
    model = small_model(1)
    sequences = [random_tokens(n, n) for n in LENGTHS]
    for ours, theirs in zip(
        score_sequences(placed(model), sequences), score_sequences(model, sequences), strict=True
    ):
        assert torch.allclose(torch.from_numpy(ours), torch.from_numpy(theirs), atol=1e-4)


def test_bfloat16_gradients_point_where_float32_ones_do() -> None:
    model = small_model(1, head_dim=64, architecture="qwen3", hidden_size=64)
    _, expected = gradients(copy.deepcopy(model))
    _, found = gradients(placed(model, "bfloat16"))
    for name, gradient in found.items():
        likeness = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert likeness > 0.95, name


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_attention_is_the_padded_reference(kv_heads: int) -> None:
    from etude.model.kernels.gpu.varlen import VarlenAttention

    reference = PackedAttention(LENGTHS, device="cuda")
    results: list[list[Tensor]] = []
    for attention in (reference, VarlenAttention(reference)):
        torch.manual_seed(0)
        inputs = [
            torch.randn(sum(LENGTHS), heads, 64, device="cuda").bfloat16().requires_grad_()
            for heads in (4, kv_heads, kv_heads)
        ]
        out = attention.attend(0, *inputs)
        out.float().square().sum().backward()
        results.append([out.detach().float(), *(x.grad.float() for x in inputs if x.grad is not None)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=3e-2, rtol=3e-2)


def test_float32_products_of_bfloat16_numbers_are_not_rounded_to_bfloat16() -> None:
    from etude.model.kernels.gpu.ops import GpuOps

    torch.manual_seed(0)
    x = torch.randn(40, 256, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(300, 256, device="cuda").bfloat16().requires_grad_()
    found = GpuOps().logits(x, weight)
    exact = x.detach().double() @ weight.detach().double().t()
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), exact, atol=1e-3)
    found.square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert (
        torch.cosine_similarity(
            x.grad.double().flatten(), (2 * exact @ weight.detach().double()).flatten(), dim=0
        )
        > 0.999
    )


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_an_optimiser_step_is_that_of_a_cpu(rule: str) -> None:
    model = small_model(1)
    results: list[dict[str, Tensor]] = []
    for trained in (copy.deepcopy(model), placed(model)):
        optimizer = Optimizer(trained, OptimizerConfig(matrix_optimizer=rule), 10)  # type: ignore[arg-type]
        gradients(trained)
        optimizer.step()
        results.append({name: p.detach().cpu() for name, p in trained.named_parameters()})
    for name, value in results[0].items():
        assert torch.allclose(results[1][name], value, atol=2e-3), name
