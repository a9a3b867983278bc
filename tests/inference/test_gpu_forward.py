"""The GPU's forward pass in the engine: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from tests.inference.builders import Client, drain, prompt, small_engine
from tests.model.builders import small_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENT = {
    "architecture": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 16}, {"head_dim": 16, "architecture": "qwen3"}, LATENT],
    ids=["mixture of experts", "dense", "latent attention"],
)
def test_turns_on_the_device_have_the_logprobs_and_routes_of_a_fresh_pass(changes: dict[str, Any]) -> None:
    model = small_model(1, **changes)
    engine = small_engine(model, prefill_tokens=7, kernels="gpu", device=DEVICE)
    clients = [Client(f"s{i}", i) for i in range(3)]
    for turn in range(2):
        for i, client in enumerate(clients):
            options = {"top_k": 5, "temperature": 0.7} if i == 2 else {}
            client.ask(engine, prompt(3 + 6 * i + turn, 10 * i + turn), max_tokens=3 + i, **options)
        drain(engine, clients)
    for client in clients[:2]:
        client.check_logprobs(model)
        if model.config.num_moe_layers:
            client.check(model)
    assert len(clients[2].tokens) > 20
