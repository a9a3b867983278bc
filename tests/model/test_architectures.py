"""Every architecture computes what transformers computes from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from etude.config import ModelConfig
from etude.model import PackedAttention, ReplayedRoutes, RouterStatistics, build_model, missing_route
from etude.model.huggingface import load_model, save_model
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from tests.model.reference import (
    ROUTED,
    VARIANTS,
    our_logits,
    our_routes,
    reference_checkpoint,
    their_logits_and_routes,
    tokens_of,
)

NEW_TOKENS = 24


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_routes_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    theirs = reference_checkpoint(tmp_path, variant)
    model = load_model(tmp_path)
    tokens = tokens_of(60)
    expected, chosen = their_logits_and_routes(theirs, tokens)
    assert expected.std() > 0.3
    torch.testing.assert_close(our_logits(model, tokens), expected, rtol=1e-5, atol=2e-5)
    routes = our_routes(model, tokens)
    assert routes.dtype == model.config.route_dtype
    assert routes.shape == (60, model.config.num_moe_layers, model.config.routes_per_token)
    assert np.array_equal(np.sort(routes), np.sort(chosen.numpy()))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    theirs = reference_checkpoint(tmp_path, variant, seed=1)
    model = load_model(tmp_path)
    said = set[int]()
    for seed in range(1, 4):
        tokens = tokens_of(12, seed=seed)
        asked = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        expected = theirs.generate(tokens[None], **asked)[0]
        for _ in range(NEW_TOKENS):
            tokens = torch.cat((tokens, our_logits(model, tokens)[-1:].argmax(-1)))
        assert tokens.tolist() == expected.tolist()
        said |= set(tokens[12:].tolist())
    assert len(said) > 1


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_within_its_rounding_of_transformers(tmp_path: Path, variant: str) -> None:
    """Routes are replayed: where two experts are nearly equal, rounding alone may choose."""
    theirs = reference_checkpoint(tmp_path, variant, seed=2)
    exact, _ = their_logits_and_routes(theirs, tokens_of(50))
    expected, chosen = their_logits_and_routes(theirs.bfloat16(), tokens_of(50))
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.embedding.dtype == torch.bfloat16
    routes = ReplayedRoutes(chosen.to(torch.uint16))
    logits = our_logits(model, tokens_of(50), routes)
    their_error = (expected - exact).abs().mean()
    assert (logits - expected).abs().mean() < 2 * their_error
    assert (logits - expected).std() < 0.05 * exact.std()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["moe", "moe_wide", "latent", "latent_kimi"])
def test_routes_are_replayed_and_missing_ones_chosen(tmp_path: Path, variant: str) -> None:
    reference_checkpoint(tmp_path, variant, seed=3)
    model = load_model(tmp_path)
    tokens = tokens_of(40)
    own = our_routes(model, tokens)
    native = our_logits(model, tokens)
    replayed = our_logits(model, tokens, ReplayedRoutes(torch.from_numpy(own)))
    torch.testing.assert_close(replayed, native, rtol=1e-4, atol=1e-5)
    other = ((own.astype(np.int64) + 1) % model.config.num_experts).astype(own.dtype)
    moved = our_logits(model, tokens, ReplayedRoutes(torch.from_numpy(other)))
    assert (moved - native).abs().max() > 0.05
    other[5:] = missing_route(torch.from_numpy(other).dtype)
    unrecorded = ReplayedRoutes(torch.from_numpy(other[5:]))
    tail = our_logits(model, tokens[5:], unrecorded)
    torch.testing.assert_close(tail, our_logits(model, tokens[5:]), rtol=1e-4, atol=1e-5)


def test_wide_routes_hold_every_expert(tmp_path: Path) -> None:
    reference_checkpoint(tmp_path, "latent_kimi", seed=3)
    routes = our_routes(load_model(tmp_path), tokens_of(100))
    assert routes.dtype == np.uint16
    assert 255 < routes.max() < 384


@pytest.mark.slow
@pytest.mark.parametrize("variant", ROUTED)
def test_gradients_of_replayed_routes_are_native_ones(tmp_path: Path, variant: str) -> None:
    reference_checkpoint(tmp_path, variant, seed=4)
    model = load_model(tmp_path)
    sequences = [tokens_of(n, n).numpy().astype(np.int32) for n in (40, 33)]
    batch = PackedSequences.pack(sequences)
    targets = torch.cat((torch.arange(1, 40), torch.arange(41, 73)))
    routes = batch.pack_rows([our_routes(model, torch.from_numpy(s).long()) for s in sequences])
    gradients = []
    for replay in (None, routes):
        model.zero_grad()
        packed_logprobs(model, batch, targets, routes=replay)[0].sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", ["dense", "latent"])
def test_gradients_agree_with_transformers(tmp_path: Path, variant: str) -> None:
    theirs = reference_checkpoint(tmp_path, variant, seed=5)
    model = load_model(tmp_path)
    tokens = tokens_of(50)
    hidden = model(tokens, torch.arange(50), PackedAttention([50]))
    model.logits(hidden).log_softmax(-1)[:, 0].sum().backward()
    theirs(tokens[None]).logits[0].float().log_softmax(-1)[:, 0].sum().backward()
    given = dict(theirs.named_parameters())
    pairs = [(model.embedding, "model.embed_tokens.weight"), (model.output_embedding, "lm_head.weight")]
    for index, block in enumerate(model.blocks):
        pairs.append((block.attention_norm, f"model.layers.{index}.input_layernorm.weight"))
        pairs.append((block.out, f"model.layers.{index}.self_attn.o_proj.weight"))
    for ours, name in pairs:
        torch.testing.assert_close(ours.grad, given[name].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_score_as_each_by_itself(tmp_path: Path, variant: str) -> None:
    reference_checkpoint(tmp_path, variant, seed=6)
    model = load_model(tmp_path)
    sequences = [tokens_of(n, n).numpy().astype(np.int32) for n in (9, 44, 21)]
    together = score_sequences(model, sequences)
    for sequence, scores in zip(sequences, together, strict=True):
        np.testing.assert_allclose(scores, score_sequences(model, [sequence])[0], atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_we_save_transformers_loads_equal(tmp_path: Path, variant: str) -> None:
    from transformers import AutoModelForCausalLM

    theirs = reference_checkpoint(tmp_path / "theirs", variant, seed=7)
    model = load_model(tmp_path / "theirs")
    save_model(model, tmp_path / "ours", max_file_bytes=30_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (name, mine), (_, given) in zip(
        sorted(back.state_dict().items()), sorted(theirs.state_dict().items()), strict=True
    ):
        assert torch.equal(mine, given), name
    tokens = tokens_of(30)
    assert torch.equal(their_logits_and_routes(back, tokens)[0], their_logits_and_routes(theirs, tokens)[0])
    again = load_model(tmp_path / "ours")
    assert again.config == model.config
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_bfloat16_model_is_saved_as_such(tmp_path: Path) -> None:
    reference_checkpoint(tmp_path / "a", "latent", seed=8)
    model = load_model(tmp_path / "a", dtype=torch.bfloat16)
    save_model(model, tmp_path / "b")
    loaded = load_model(tmp_path / "b", dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert a.dtype == b.dtype == (torch.float32 if name.endswith("score_bias") else torch.bfloat16)
        assert torch.equal(a, b), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_new_model_of_each_architecture_learns(architecture: str, tied: bool) -> None:
    config = ModelConfig(architecture=architecture, tie_embeddings=tied, hidden_size=32, num_layers=2)  # type: ignore[arg-type]
    model = build_model(config, 50)
    model.initialise(0)
    batch = PackedSequences.pack([(np.arange(40) * 7 % 50).astype(np.int32)])
    targets = torch.arange(1, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        statistics = RouterStatistics([], [])
        logprobs, _ = packed_logprobs(model, batch, targets, statistics=statistics)
        loss = -logprobs.mean() + 0.01 * statistics.balance_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert len(statistics.shares) == config.num_moe_layers
    assert losses[0] == pytest.approx(np.log(50), abs=0.2)
    assert losses[-1] < 0.5 * losses[0]
