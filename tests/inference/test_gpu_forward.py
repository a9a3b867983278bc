"""The GPU's forward pass in the engine: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import numpy as np

from etude.inference import Engine, MtpDrafts
from etude.inference.cache import PAGE_TOKENS, PagedCache, StepRows
from etude.inference.gpu import Compute, GpuForward, run_uncaptured
from etude.model.scoring import score_sequences
from tests.inference.builders import Client, drain, prompt, small_engine
from tests.inference.test_adapters import adapted, check, put_in, run
from tests.model.builders import VOCAB, draft_layers, random_tokens, small_model

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


@pytest.mark.parametrize("changes", [{"head_dim": 16}, LATENT], ids=["grouped", "latent attention"])
def test_drafts_and_halved_caches_do_on_the_device_what_they_do_elsewhere(changes: dict[str, Any]) -> None:
    model = small_model(3, **changes)
    drafts = MtpDrafts(draft_layers(model), 2, adaptive=False)
    options: list[dict[str, Any]] = [{}, {"drafts": drafts}, {"cache_dtype": "bfloat16"}]
    engines = [small_engine(model, kernels="gpu", device=DEVICE, **given) for given in options]
    clients = [Client("s", 0) for _ in engines]
    for engine, client in zip(engines, clients, strict=True):
        client.ask(engine, prompt(20, 0), max_tokens=8)
        drain(engine, [client])
    assert clients[1].tokens == clients[0].tokens
    assert engines[1].counters.drafted_tokens > 5
    scores = score_sequences(model, [np.array(clients[2].tokens, dtype=np.int32)])[0]
    sampled = np.array(clients[2].sampled)
    differences = np.abs(np.array(clients[2].logprobs)[sampled] - scores[sampled])
    assert 1e-6 < np.median(differences) < 0.1  # one token may have taken another route


class CountedCaptures:
    """A Capture without graphs that counts what it captured and what was repeated."""

    def __init__(self) -> None:
        self.captured = self.repeated = 0

    def __call__(self, compute: Compute) -> Compute:
        self.captured += 1

        def repeat() -> None:
            self.repeated += 1
            compute()

        return repeat


def filled_cache(model: Any, num_pages: int = 12) -> PagedCache:
    """A cache whose pages all hold something."""
    cache = PagedCache(model.config, num_pages, torch.device(DEVICE))
    generator = torch.Generator().manual_seed(5)
    for store in (cache.keys, cache.values):
        if store is not None:
            store.copy_(torch.randn(store.shape, generator=generator))
    return cache


def decode_rows(lengths: list[int], counts: list[int] | None = None, seed: int = 0) -> StepRows:
    """The last tokens of sequences of `lengths`, in pages that are dealt out in turn."""
    taken = np.array(counts or [1] * len(lengths))
    tables = np.zeros((len(lengths), max(-(-n // PAGE_TOKENS) for n in lengths)), dtype=np.int32)
    free = iter(range(100))
    for row, length in zip(tables, lengths, strict=True):
        for page in range(-(-length // PAGE_TOKENS)):
            row[page] = next(free)
    tokens = random_tokens(int(taken.sum()), seed).astype(np.int64)
    return StepRows.plan(tokens, tables, taken, np.array(lengths) - taken)


@pytest.mark.parametrize("changes", [{}, LATENT], ids=["grouped queries", "latent attention"])
def test_a_step_from_fixed_buffers_computes_what_a_plain_one_does(changes: dict[str, Any]) -> None:
    model = small_model(2, **changes).to(DEVICE)
    for rows in (decode_rows([20, 3, 40]), decode_rows([18, 50], [3, 1], seed=1)):
        plain, fixed = filled_cache(model), filled_cache(model)
        hidden, routes = GpuForward(model, plain, max_captured_rows=0)(rows)
        captured, captured_routes = GpuForward(model, fixed, run_uncaptured)(rows)
        assert torch.allclose(captured, hidden, atol=1e-5) and torch.equal(captured_routes, routes)
        assert torch.allclose(fixed.keys, plain.keys, atol=1e-5)


def test_rows_that_fill_the_buffers_write_into_no_page() -> None:
    model = small_model(2).to(DEVICE)
    cache = filled_cache(model)
    before, rows = cache.keys.clone(), decode_rows([20, 3, 40])
    GpuForward(model, cache, run_uncaptured)(rows)
    written = (cache.keys != before).any(dim=(0, 2, 3)).cpu()
    expected = torch.zeros_like(written)
    expected[torch.from_numpy(rows.pages.astype(np.int64)), torch.from_numpy(rows.offsets)] = True
    assert torch.equal(written, expected)


def test_each_size_of_step_is_captured_once_and_repeated_with_what_the_next_step_brings() -> None:
    model, captures = small_model(2).to(DEVICE), CountedCaptures()
    cache, fresh = filled_cache(model), filled_cache(model)
    forward = GpuForward(model, cache, captures)
    forward(decode_rows([20, 3, 40]))
    later = decode_rows([21, 4, 41, 7], seed=3)
    hidden, routes = forward(later)
    assert (captures.captured, captures.repeated) == (1, 2)
    GpuForward(model, fresh, run_uncaptured)(decode_rows([20, 3, 40]))
    expected, expected_routes = GpuForward(model, fresh, run_uncaptured)(later)
    assert torch.equal(hidden, expected) and torch.equal(routes, expected_routes)
    forward(decode_rows([22]))
    assert captures.captured == 2


def test_captured_steps_compute_with_the_weights_that_are_staged_into_them() -> None:
    model, cache, rows = small_model(2).to(DEVICE), filled_cache(small_model(2)), decode_rows([20, 3])
    forward = GpuForward(model, cache, run_uncaptured)
    before = forward(rows)[0].clone()
    other = small_model(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dict(other.named_parameters())[name])
    forward.load_weights()
    after = forward(rows)[0].clone()
    assert not torch.allclose(after, before)
    expected = GpuForward(other.to(DEVICE), filled_cache(other), run_uncaptured)(rows)[0]
    assert torch.equal(after, expected)


@pytest.mark.parametrize("changes", [{}, {"architecture": "qwen3"}], ids=["mixture of experts", "dense"])
def test_adapters_do_on_the_device_what_they_do_elsewhere(changes: dict[str, Any]) -> None:
    """Alone, where dense models are captured, and side by side; old graphs compute no new version."""
    changes = {"head_dim": 16, **changes}
    sides = {"a": adapted(changes, 1), "b": adapted(changes, 2)}
    engine = Engine(sides["a"][0].config, VOCAB, 4, 100, 64, "gpu", device=DEVICE)
    for turn, names in enumerate((["a"], ["a"], ["a", "b"])):
        sides["a"] = adapted(changes, 3 + turn)
        versions = {name: put_in(engine, name, turn, *sides[name]) for name in names}
        clients = {name: Client(f"{name}{turn}", turn) for name in names}
        for name, client in clients.items():
            engine.submit(client.request(prompt(20, turn), max_tokens=8, version=versions[name]))
        run(engine, {client.name: client for client in clients.values()})
        for name, client in clients.items():
            check(client, sides[name][0], versions[name])
