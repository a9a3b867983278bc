"""Low-rank adapters: gradients equal the formula's, and only the factors are trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from etude.config import AdapterConfig
from etude.errors import CheckpointError, ConfigError
from etude.model.loading import AnyModel
from etude.model.lora import Adapters
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from tests.model.builders import PLAIN_LATENT, random_tokens, small_model
from tests.model.transformers_builders import tiny_model

CONFIG = AdapterConfig(rank=3, alpha=6.0)


def learned_adapters(model: nn.Module, **changes: Any) -> Adapters:
    """Adapters that have moved."""
    adapters = Adapters(model, CONFIG.model_copy(update=changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    return adapters


def loss_of(model: Any) -> torch.Tensor:
    batch = PackedSequences.pack([random_tokens(20, 1), random_tokens(11, 2)])
    targets = torch.tensor([3, 7, 19, 25, 30])
    chosen, _ = packed_logprobs(model, batch, targets)
    return chosen.sum()


LATENT_RANK: dict[str, Any] = {**PLAIN_LATENT, "q_lora_rank": 12}


@pytest.mark.parametrize(
    "make",
    [
        small_model,
        lambda: small_model(architecture="qwen3", intermediate_size=48),
        lambda: small_model(**LATENT_RANK),
        lambda: tiny_model("mixtral"),
    ],
)
def test_factors_get_the_gradient_of_the_sum_which_is_never_formed(make: Any) -> None:
    merged, adapted = make(), make()
    base = {name: parameter.detach().clone() for name, parameter in merged.named_parameters()}
    adapters = learned_adapters(adapted)
    with adapters.merged():
        merged.load_state_dict(adapted.state_dict())
        torch.testing.assert_close(loss_of(adapted), loss_of(merged))
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, base[name])
    loss = loss_of(merged)
    loss.backward()
    for _ in range(2):  # as two micro-batches of one update
        again = loss_of(adapted)
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-4)
        again.backward()
    pairs, scale = dict(adapters.named_parameters()), CONFIG.alpha / CONFIG.rank
    for name, left, right in adapters.factors():
        weight = merged.get_parameter(name)
        torch.testing.assert_close(weight.detach(), base[name] + scale * left @ right, rtol=1e-5, atol=1e-6)
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0
        expected = {"left": weight.grad @ right.mT, "right": left.mT @ weight.grad}
        for side, gradient in expected.items():
            got = pairs[f"{name.replace('.', '/')}.{side}"].grad
            torch.testing.assert_close(got, 2 * scale * gradient, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad is None for parameter in adapted.parameters())


def test_new_adapters_change_nothing_and_are_few() -> None:
    model, plain = small_model(), small_model()
    adapters = Adapters(model, CONFIG)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    given = [random_tokens(20)]
    ours, theirs = score_sequences(model, given)[0], score_sequences(plain, given)[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in adapters.parameters()) < sum(p.numel() for p in plain.parameters()) / 3
    adapted = {name for name, _, _ in adapters.factors()}
    assert not any("router" in name or "norm" in name or "embedding" in name for name in adapted)
    assert {name.rpartition(".")[2] for name in adapted} == {"qkv", "out", "gate_up", "down"}


@torch.no_grad()
def hidden_of(model: Any) -> np.ndarray:
    batch = PackedSequences.pack([random_tokens(120, seed) for seed in range(16)])
    return model(batch.tokens, batch.positions, batch.attention).float().numpy().ravel()


def test_a_hundred_small_updates_of_a_bfloat16_model_survive() -> None:
    """Hidden states move as those of a float32 model do that gets the same updates; merged, most is lost."""
    moved: dict[str, np.ndarray] = {}
    for way in ("float32", "bfloat16", "merged"):
        model = small_model(architecture="qwen3", intermediate_size=48)
        model.cast(torch.bfloat16)
        if way == "float32":
            model.cast(torch.float32)
        adapters = Adapters(model, AdapterConfig(rank=4, alpha=4.0))
        before, generator = hidden_of(model), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for factors in adapters.parameters():
                direction = torch.randn(factors.shape, generator=generator)
                for _ in range(100):
                    factors += 3e-6 * direction
        if way == "merged":
            adapters.merge()
        moved[way] = hidden_of(model) - before
    wanted = moved["float32"]
    survived = {way: float(wanted @ change / (wanted @ wanted)) for way, change in moved.items()}
    assert 0.85 < survived["bfloat16"] < 1.15 and survived["merged"] < 0.5, survived


def test_state_goes_on_exactly_and_only_over_its_own_base() -> None:
    model, again = small_model(), small_model()
    state = learned_adapters(model).state()
    Adapters(again, CONFIG).load_state(state)
    np.testing.assert_array_equal(
        score_sequences(model, [random_tokens(20)])[0], score_sequences(again, [random_tokens(20)])[0]
    )
    for other, config in (
        (small_model(1), CONFIG),
        (small_model(), CONFIG.model_copy(update={"alpha": 7.0})),
        (small_model(), CONFIG.model_copy(update={"targets": ("qkv",)})),
    ):
        before = score_sequences(other, [random_tokens(20)])[0]
        with pytest.raises(CheckpointError, match="another base model or configuration"):
            Adapters(other, config).load_state(state)
        np.testing.assert_allclose(score_sequences(other, [random_tokens(20)])[0], before, rtol=1e-6)


def test_a_target_that_names_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="gate_up"):
        Adapters(small_model(), AdapterConfig(rank=2, targets=("q_proj",)))


def test_a_rank_above_that_of_every_weight_is_refused_and_the_model_stays_as_it_was() -> None:
    model = small_model()
    largest = max(min(weight.shape[-2:]) for weight in model.parameters() if weight.ndim >= 2)
    with pytest.raises(ConfigError, match=r"rl\.adapter\.rank.*or less") as caught:
        Adapters(model, AdapterConfig(rank=largest + 1))
    assert caught.value.received == largest + 1
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "gpt_oss", "deepseek"])
def test_targets_by_word_find_projections_and_never_routers(kind: str) -> None:
    model: AnyModel = small_model(**PLAIN_LATENT) if kind == "deepseek" else tiny_model(kind)
    adapters = Adapters(model, AdapterConfig(rank=2))
    last = {name.removesuffix(".weight").rpartition(".")[2] for name, _, _ in adapters.factors()}
    expected = {
        "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        "gpt_oss": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
        "deepseek": {"query_up", "compress", "key_up", "value_up", "out", "gate_up", "down"},
    }
    expected["glm4_moe"] = expected["llama"] | {"gate_up_proj"}
    assert last == expected[kind]
