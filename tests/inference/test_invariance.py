"""What the engine samples with native kernels has exactly the trainer's log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.model import LanguageModel, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.scoring import score_sequences
from tests.inference.builders import Client, drain, needs_compiler, small_engine
from tests.model.builders import LATENT, VOCAB, random_tokens, small_config

pytestmark = needs_compiler
SHAPES: list[dict[str, Any]] = [
    {},
    {"architecture": "qwen3", "intermediate_size": 40, "tie_embeddings": False},
    {"architecture": "llama", "hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    {"architecture": "qwen2", "num_heads": 4, "num_kv_heads": 2},
    {"hidden_size": 76, "num_heads": 6, "num_kv_heads": 2, "head_dim": 20, "experts_per_token": 3},
    LATENT,
]


def model_of(shape: dict[str, Any]) -> LanguageModel:
    model = build_model(small_config(**({"max_positions": 160} | shape)), VOCAB)
    model.initialise(7)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv_bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5, torch.Generator().manual_seed(0))
    return model.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_scoring_gives_exactly_the_sampled_logprobs(shape: dict[str, Any], data: st.DataObject) -> None:
    model = model_of(shape)
    temperature = data.draw(st.sampled_from([1.0, 0.7, 1.9]))
    engine = small_engine(
        model,
        num_sessions=5,
        max_tokens=150,
        prefill_tokens=data.draw(st.sampled_from([16, 40, 500])),
        kernels="native",
        native_threads=data.draw(st.integers(1, 2)),
        num_pages=data.draw(st.sampled_from([12, 60])),  # with 12, requests lose their pages to each other
    )
    clients = [Client(f"c{i}", i) for i in range(data.draw(st.integers(1, 5)))]
    for turn in range(2):
        for i, client in enumerate(clients):
            given_tokens = random_tokens(data.draw(st.integers(1, 45)), 10 * turn + i)
            client.ask(engine, given_tokens.tolist(), max_tokens=20, temperature=temperature)
        drain(engine, clients)
    model.ops = InvariantOps()
    packed = score_sequences(
        model, [np.array(client.tokens, dtype=np.int32) for client in clients], temperature=temperature
    )
    for client, scores in zip(clients, packed, strict=True):
        sampled = np.array(client.sampled)
        np.testing.assert_array_equal(np.array(client.logprobs, dtype=np.float32)[sampled], scores[sampled])
        if not model.config.num_moe_layers:
            continue
        routes = np.stack([client.routes[position] for position in range(len(client.tokens) - 1)])
        replayed = np.concatenate((routes, routes[-1:]))  # the last position is not computed yet
        (replay,) = score_sequences(
            model,
            [np.array(client.tokens, dtype=np.int32)],
            temperature=temperature,
            routes=[replayed],
        )
        np.testing.assert_array_equal(replay[sampled], scores[sampled])
