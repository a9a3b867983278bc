"""The engine on a GPU: tokens equal to a CPU's, CUDA graphs equal to eager execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.inference.gpu import CudaGraphs, GpuForward, run_uncaptured
from tests.inference.builders import Client, drain, prompt, serve, small_engine
from tests.inference.test_gpu_forward import LATENT, decode_rows, filled_cache
from tests.model.builders import small_model

CASES = pytest.mark.parametrize(
    "changes",
    [{"head_dim": 16}, {"head_dim": 16, "architecture": "qwen3"}, LATENT],
    ids=["mixture of experts", "dense", "latent attention"],
)


def greedy_sessions(engine: Any, count: int = 5) -> list[list[int]]:
    """Tokens of sessions of two turns, sampled greedily side by side."""
    clients = [Client(f"s{i}", i) for i in range(count)]
    for turn in range(2):
        for i, client in enumerate(clients):
            client.ask(engine, prompt(3 + 7 * i, 10 * i + turn), max_tokens=4 + i, temperature=0.0)
        drain(engine, clients)
    return [client.tokens for client in clients]


@CASES
def test_greedy_tokens_are_those_of_a_cpu(changes: dict[str, Any]) -> None:
    model = small_model(1, **changes)
    on_cpu = greedy_sessions(small_engine(model, num_sessions=5, prefill_tokens=11))
    engine = small_engine(model, num_sessions=5, prefill_tokens=11, kernels="gpu", device="cuda")
    assert greedy_sessions(engine) == on_cpu


@CASES
def test_a_graph_gives_the_bits_of_what_it_was_captured_from(changes: dict[str, Any]) -> None:
    model = small_model(2, **changes).cuda()
    plain, graphed = filled_cache(model), filled_cache(model)
    captured, eager = GpuForward(model, graphed, CudaGraphs()), GpuForward(model, plain, run_uncaptured)
    steps = ([20, 3, 40], None, 0), ([21, 4, 41], None, 1), ([30], None, 2), ([40, 9], [3, 1], 3)
    for lengths, counts, seed in (*steps, *steps):
        rows = decode_rows(lengths, counts, seed)
        hidden, routes = captured(rows)
        expected, expected_routes = eager(rows)
        assert torch.equal(hidden, expected) and torch.equal(routes, expected_routes)
    assert torch.equal(graphed.keys, plain.keys)


def test_graphs_compute_with_the_weights_of_the_next_version() -> None:
    first, second = small_model(1), small_model(2)
    engine = small_engine(first, num_sessions=5, kernels="gpu", device="cuda")
    greedy_sessions(engine)
    for step, model in ((1, second), (2, first), (3, second)):
        serve(engine, model, step, kv="recompute")
        fresh = small_engine(model, num_sessions=5, kernels="gpu", device="cuda")
        assert greedy_sessions_anew(engine, step) == greedy_sessions(fresh)


def greedy_sessions_anew(engine: Any, step: int) -> list[list[int]]:
    """As `greedy_sessions`, in an engine whose sessions of that name are over."""
    for session in range(5):
        engine.close(f"s{session}")
    assert engine.current().step == step
    return greedy_sessions(engine)


def test_bfloat16_weights_give_logprobs_near_float32() -> None:
    model = small_model(1, head_dim=16)
    engine = small_engine(model, kernels="gpu", device="cuda", native_weights="bfloat16")
    client = Client("s", 0)
    client.ask(engine, prompt(30, 0), max_tokens=20)
    drain(engine, [client])
    from etude.model.scoring import score_sequences

    scores = score_sequences(model, [torch.tensor(client.tokens, dtype=torch.int32).numpy()])[0]
    apart = [abs(a - b) for a, b, own in zip(client.logprobs, scores, client.sampled, strict=True) if own]
    assert sum(apart) / len(apart) < 0.1
