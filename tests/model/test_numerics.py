"""With bfloat16 weights, sensitive parts remain float32: router, sum over experts, output head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.model import TorchOps
from etude.model.language_model import LanguageModel, build_model
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.training.parity import compare_logprobs
from tests.fakes.half import HalfOps
from tests.model.builders import VOCAB, fresh_routes, random_tokens, small_config

HALF = torch.bfloat16
SEQUENCES = [random_tokens(length, length) for length in (60, 41, 77)]


def half_model(seed: int = 5) -> LanguageModel:
    model = build_model(small_config(num_experts=8), VOCAB)
    model.initialise(seed)
    return model.requires_grad_(requires_grad=False).cast(HALF)


def random_half(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def test_router_scores_and_logits_are_float32_products() -> None:
    ops, x, weight = TorchOps(), random_half(9, 32), random_half(16, 32, seed=1)
    expected = F.linear(x.float(), weight.float())
    for found in (ops.router(x, weight), ops.logits(x, weight)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert float((HalfOps().logits(x, weight) - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("grad", [True, False], ids=["sorted", "all experts at once"])
def test_the_sum_over_experts_is_rounded_once(grad: bool) -> None:
    """Two experts whose outputs nearly cancel: in bfloat16 the products' rounding would be what is left."""
    x = torch.eye(8, dtype=HALF)[:1].expand(3, 8).contiguous()
    gate_up = torch.zeros(2, 8, 16, dtype=HALF)
    gate_up[:, 0, [0, 8]] = 8.0
    inner = (F.silu(torch.tensor(8.0, dtype=HALF)) * 8).float()
    down = torch.zeros(2, 8, 8, dtype=HALF)
    down[:, 0, 0] = torch.tensor([1.0, -1.0])
    chosen = torch.tensor([[0, 1]] * 3)
    weights = torch.tensor([[0.5004, 0.4996]] * 3)
    with torch.set_grad_enabled(grad):
        mixed = TorchOps().experts(x, gate_up, down, chosen, weights)
    assert mixed.dtype == HALF
    expected = (weights[:, :1] * inner - weights[:, 1:] * inner).to(HALF)
    torch.testing.assert_close(mixed[:, :1], expected, rtol=0, atol=0)
    in_half = weights.to(HALF)
    assert float(((in_half[:, :1] - in_half[:, 1:]) * inner - expected).abs().max()) > 0.01


def test_logprobs_and_entropies_of_a_model_in_bfloat16_are_float32() -> None:
    model = half_model()
    batch = PackedSequences.pack(SEQUENCES)
    logprobs, entropy = packed_logprobs(model, batch, torch.tensor([1, 5, 90]))
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {HALF}


def test_with_the_same_experts_that_is_nearer_to_float32_than_bfloat16_throughout() -> None:
    """Other experts would make more of a difference than any rounding: all three replay the exact model's."""
    near, far = zip(*(k3_of_shipped_and_coarse(seed) for seed in range(8)), strict=True)
    assert sum(near) < sum(far)


def k3_of_shipped_and_coarse(seed: int) -> tuple[float, float]:
    model = half_model(seed)
    exact = build_model(model.config, VOCAB)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    routes = [fresh_routes(exact, tokens) for tokens in SEQUENCES]
    reference = score_sequences(exact, SEQUENCES, routes=routes)
    shipped = score_sequences(model, SEQUENCES, routes=routes)
    model.ops = HalfOps()
    coarse = score_sequences(model, SEQUENCES, routes=routes)
    return compare_logprobs(reference, shipped).k3, compare_logprobs(reference, coarse).k3


def test_a_router_bias_stays_float32_when_the_rest_is_cast() -> None:
    config = small_config(architecture="deepseek_v3", first_k_dense_replace=1, kv_lora_rank=16)
    model = build_model(config, VOCAB).cast(HALF)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    biases = [name for name in types if name.endswith(".score_bias")]
    assert biases
    assert all(types[name] == (torch.float32 if name in biases else HALF) for name in types)
