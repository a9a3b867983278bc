"""Keys and values in bfloat16: half the memory, and log-probabilities within what eight bits allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import ConfigError
from etude.inference import MtpDrafts, page_bytes
from etude.inference.cache import CacheFormat, PagedCache
from etude.model.scoring import score_sequences
from tests.inference.builders import Client, cache_bytes, drain, needs_compiler, prompt, small_engine
from tests.model.builders import draft_layers, small_config, small_model

_LATENT = {
    "architecture": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize("changes", [{}, _LATENT])
def test_bfloat16_keys_cost_little_in_logprob_and_half_the_memory(changes: dict) -> None:
    model = small_model(3, **changes)
    exact, half = small_engine(model), small_engine(model, cache_dtype="bfloat16")
    assert cache_bytes(half._cache) * 2 == cache_bytes(exact._cache)
    clients = [Client(f"s{number}", number) for number in range(4)]
    for number, client in enumerate(clients):
        client.ask(half, prompt(30, number), max_tokens=40)
    drain(half, clients)
    differences: list[float] = []
    for client in clients:
        scores = score_sequences(model, [np.array(client.tokens, dtype=np.int32)])[0]
        sampled = np.array(client.sampled)
        differences += np.abs(np.array(client.logprobs)[sampled] - scores[sampled]).tolist()
    assert 1e-5 < np.mean(differences) < 0.02
    assert np.max(differences) < 0.2


def test_drafts_keep_their_keys_as_the_model_does() -> None:
    model = small_model(3)
    drafts = MtpDrafts(draft_layers(model), 2)
    engine = small_engine(model, cache_dtype="bfloat16", drafts=drafts)
    plain = small_engine(model, cache_dtype="bfloat16")
    assert engine._cache.drafts is not None
    assert engine._cache.drafts.keys.dtype == torch.bfloat16
    clients = Client("s", 0), Client("s", 0)
    for client, one in zip(clients, (engine, plain), strict=True):
        client.ask(one, prompt(10, 0), max_tokens=30, temperature=0.0)
        drain(one, [client])
    assert clients[0].tokens == clients[1].tokens


@needs_compiler
def test_native_kernels_refuse_what_they_do_not_read() -> None:
    with pytest.raises(ConfigError, match="float32") as caught:
        small_engine(kernels="native", cache_dtype="bfloat16")
    assert caught.value.field == "engine.cache_dtype"


@pytest.mark.parametrize("shape", [{}, {"architecture": "qwen3", "intermediate_size": 40}])
def test_the_size_of_a_page_is_what_a_cache_of_one_page_takes(shape: dict[str, Any]) -> None:
    config = small_config(**shape)
    formats: tuple[CacheFormat, ...] = ("float32", "bfloat16")
    for dtype in formats:
        cache = PagedCache(config, 1, dtype=getattr(torch, dtype))
        assert page_bytes(config, dtype) == cache_bytes(cache) + cache.routes.nbytes
