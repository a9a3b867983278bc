"""Blocks that are computed again give the same bits, ask for experts once, and keep less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from etude.model import PackedAttention, RecordedRoutes, RouterStatistics
from etude.model.routes import NativeRoutes
from etude.model.scoring import PackedSequences, packed_logprobs
from tests.model.builders import random_tokens, small_model

VARIANTS: dict[str, dict[str, Any]] = {
    "mixture of experts": {},
    "dense": {"architecture": "qwen3"},
    "latent": {
        "architecture": "deepseek_v3",
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def _gradients(changes: dict[str, Any], recompute: bool, routes: Any = None) -> tuple[Tensor, ...]:
    model = small_model(3, **changes)
    model.checkpoint_activations(recompute)
    batch = PackedSequences.pack([random_tokens(n, n) for n in (40, 22, 3)])
    statistics = RouterStatistics([], [])
    logprobs, _ = packed_logprobs(model, batch, torch.arange(1, 40), routes=routes, statistics=statistics)
    loss = logprobs.mean() + 0.1 * statistics.balance_loss()
    loss.backward()
    assert len(statistics.shares) == model.config.num_moe_layers
    return loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradients_are_the_same_bits(changes: dict[str, Any]) -> None:
    kept, again = _gradients(changes, False), _gradients(changes, True)
    assert len(kept) == len(again) > 5
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_experts_are_asked_for_once_per_layer() -> None:
    asked: list[int] = []

    class Counted(NativeRoutes):
        def select(self, layer: int, scores: Tensor) -> Tensor:
            asked.append(layer)
            return super().select(layer, scores)

    _gradients({}, True, Counted(2))
    assert asked == [0, 1]


def test_recorders_record_one_pass() -> None:
    model = small_model()
    model.checkpoint_activations()
    recorder = RecordedRoutes.of(model.config)
    tokens = torch.from_numpy(random_tokens(9)).long()
    model(tokens, torch.arange(9), PackedAttention([9]), recorder).sum().backward()
    assert recorder.pop_routes().shape == (9, 2, 2)


def test_less_is_kept_for_the_backward_pass() -> None:
    def kept_bytes(recompute: bool) -> int:
        kept: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return value

        model = small_model()
        model.checkpoint_activations(recompute)
        batch = PackedSequences.pack([random_tokens(100)])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            model(batch.tokens, batch.positions, batch.attention).sum()
        for parameter in model.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(kept.values())

    assert kept_bytes(True) < 0.3 * kept_bytes(False)
