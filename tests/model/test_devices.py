"""A pass computes where its model's weights lie: shown on `meta`, which refuses sums of two devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.model import PackedAttention, RouterStatistics
from etude.model.scoring import PackedSequences, device_of, packed_logprobs
from tests.model.builders import random_tokens, small_model

LATENT = {
    "architecture": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"architecture": "qwen3"}, LATENT],
    ids=["mixture of experts", "dense", "latent attention"],
)
def test_a_training_pass_stays_on_the_models_device(changes: dict[str, Any]) -> None:
    model = small_model(1, **changes).cast(torch.bfloat16).to("meta")
    sequences = [random_tokens(n, n) for n in (40, 22, 20, 3)]
    batch = PackedSequences.pack(sequences, device_of(model))
    targets, statistics = torch.arange(1, 40, device="meta"), RouterStatistics([], [])
    logprobs, entropy = packed_logprobs(model, batch, targets, statistics=statistics)
    (logprobs.mean() + statistics.balance_loss()).backward()
    assert {x.device.type for x in (logprobs, entropy, batch.pack_rows(sequences))} == {"meta"}
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_packed_attention_puts_its_indices_where_its_rows_are() -> None:
    lengths = [9, 8, 2]
    rows = [torch.empty(sum(lengths), heads, 16, device="meta") for heads in (4, 2, 2)]
    assert PackedAttention(lengths, device="meta").attend(0, *rows).shape == (19, 4, 16)
