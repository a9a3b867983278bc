"""Batch-invariant operations: the bits of the engine, the gradients of the module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import ResourceError
from etude.model import LanguageModel, PackedAttention, RouterStatistics, build_model
from etude.model.kernels.invariant import InvariantOps, InvariantPackedAttention
from etude.model.kernels.native import find_compiler
from etude.model.ops import TorchOps
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from tests.model.builders import LATENT, VOCAB, random_tokens, small_config

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
SHAPES: list[dict[str, Any]] = [
    {},
    {"architecture": "qwen3", "intermediate_size": 40, "tie_embeddings": False},
    {"architecture": "llama", "hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    {"architecture": "qwen2", "num_heads": 4, "num_kv_heads": 2},
    {"hidden_size": 76, "num_heads": 3, "num_kv_heads": 3, "head_dim": 10, "expert_size": 12},
    {"num_experts": 40, "experts_per_token": 6, "norm_topk_prob": False},
    LATENT,
]


def model_of(shape: dict[str, Any]) -> LanguageModel:
    model = build_model(small_config(**shape), VOCAB)
    model.initialise(2)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv_bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5, torch.Generator().manual_seed(0))
    return model


def sequences(lengths: tuple[int, ...] = (70, 31, 100, 2, 16)) -> list[NDArray[np.int32]]:
    return [random_tokens(length, seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_do_not_depend_on_what_is_packed_together_nor_on_threads(shape: dict[str, Any]) -> None:
    model = model_of(shape)
    model.ops = InvariantOps()
    together = score_sequences(model, sequences(), temperature=0.8)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for one, expected in zip(sequences(), together, strict=True):
            np.testing.assert_array_equal(score_sequences(model, [one], temperature=0.8)[0], expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_the_module(shape: dict[str, Any]) -> None:
    model = model_of(shape)
    batch = PackedSequences.pack(sequences())
    targets = torch.arange(1, 69)
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for ops in (TorchOps(), InvariantOps()):
        model.ops = ops
        model.zero_grad()
        statistics = RouterStatistics([], [])
        logprobs, _ = packed_logprobs(model, batch, targets, statistics=statistics)
        (logprobs.sum() + statistics.balance_loss()).backward()
        found.append(
            (logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    (expected, gradients), (logprobs, own) = found
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    assert own.keys() == gradients.keys() and own
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(own[name], gradient, atol=1e-4 * scale + 1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("shape", [SHAPES[0], LATENT])
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_have_the_same_bits_each_time(shape: dict[str, Any], threads: int) -> None:
    model = model_of(shape)
    model.ops = InvariantOps()
    batch = PackedSequences.pack(sequences())
    found: list[list[Tensor]] = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for _ in range(3):
            model.zero_grad()
            packed_logprobs(model, batch, torch.arange(1, 69))[0].sum().backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def numeric_gradient(loss: Any, x: Tensor) -> Tensor:
    """Central differences."""
    result = torch.zeros_like(x)
    for i in range(x.numel()):
        step = torch.zeros(x.numel())
        step[i] = 1e-2
        step = step.view_as(x)
        result.view(-1)[i] = (loss(x + step) - loss(x - step)) / 2e-2
    return result


@pytest.mark.parametrize(
    "name",
    ["linear", "linear_add", "rms_norm", "silu_gate", "softmax", "sigmoid", "log_softmax", "attention"],
)
def test_gradients_are_the_slope_of_the_forward_pass(name: str) -> None:
    ops = InvariantOps()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((6, 6), generator=generator)
    key, value = (torch.randn((3, 1, 6), generator=generator) for _ in range(2))
    blocks: dict[str, Any] = {
        "linear": lambda x: ops.linear(x, weight),
        "linear_add": lambda x: ops.linear_add(x.tanh(), x, weight),
        "rms_norm": lambda x: ops.rms_norm(x, weight[0], 1e-6),
        "silu_gate": lambda x: ops.silu_gate(x, weight[:3]),
        "softmax": lambda x: ops.activate(x, "softmax"),
        "sigmoid": lambda x: ops.activate(x, "sigmoid"),
        "log_softmax": ops.log_softmax,
        "attention": lambda x: InvariantPackedAttention([3]).attend(0, x[:, None], key, value)[:, 0],
    }
    mask = torch.randn((3, 6), generator=generator)
    x = torch.randn((3, 6), generator=generator).requires_grad_()

    def loss(rows: Tensor) -> Tensor:
        return (blocks[name](rows) * mask).sum()

    loss(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(
        x.grad, numeric_gradient(lambda y: loss(y).detach(), x.detach()), atol=5e-3, rtol=1e-2
    )


def test_attention_is_that_of_the_reference() -> None:
    lengths = [130, 64, 17, 16, 1]
    rows = sum(lengths)
    query, key, value = (torch.randn((rows, heads, 20)) for heads in (6, 2, 2))
    expected = PackedAttention(lengths).attend(0, query, key, value)
    torch.testing.assert_close(
        InvariantPackedAttention(lengths).attend(0, query, key, value), expected, atol=1e-5, rtol=1e-5
    )


def test_narrower_values_must_be_the_beginning_of_the_key() -> None:
    lengths = [130, 64, 17, 1]
    rows = sum(lengths)
    query, key = torch.randn((rows, 20, 20)), torch.randn((rows, 1, 20))
    value = key[..., :12]
    expected = PackedAttention(lengths).attend(0, query, key, value)
    own = InvariantPackedAttention(lengths)
    torch.testing.assert_close(own.attend(0, query, key, value), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ResourceError) as caught:
        own.attend(0, query, key, value.clone())
    assert caught.value.field == "value"


def test_other_types_than_float32_are_refused_by_name() -> None:
    with pytest.raises(ResourceError) as caught:
        InvariantOps().linear(
            torch.ones((2, 4), dtype=torch.bfloat16), torch.ones((4, 4), dtype=torch.bfloat16)
        )
    assert caught.value.field == "model.ops"
    with pytest.raises(ResourceError):
        InvariantOps().linear(torch.ones((2, 4)), torch.ones((4, 4), dtype=torch.bfloat16))
