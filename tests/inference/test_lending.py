"""An engine that frees its memory between sessions computes the same as one that keeps it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import SamplerError
from etude.inference import Engine, EngineService, MtpDrafts
from etude.inference.cache import PagedCache
from etude.inference.engine import Kernels
from etude.inference.gpu import GpuForward, run_uncaptured
from etude.weights import MemoryWeights
from tests.inference.builders import ALL_KERNELS, Client, drain, held_bytes, prompt, serve, small_engine
from tests.inference.invariants import check_engine
from tests.model.builders import draft_layers, random_tokens, small_config, small_model

LATENT = {"architecture": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


def _session(engine: Engine, name: str) -> Client:
    client = Client(name, 0)
    for turn in range(2):
        client.ask(engine, prompt(20 + turn, turn), max_tokens=6)
        drain(engine, [client])
    engine.close(name)
    return client


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("changes", [{}, LATENT], ids=["grouped", "latent attention"])
def test_an_engine_that_gave_its_memory_back_samples_the_same(
    kernels: Kernels, changes: dict[str, Any]
) -> None:
    model = small_model(1, **changes)
    keeping, lending = (small_engine(model, kernels=kernels, keep_spare=keep) for keep in (True, False))
    expected = [_session(keeping, name) for name in ("a", "b")]
    first = _session(lending, "a")
    lending.release_memory()
    assert not lending._cache.is_allocated
    second = _session(lending, "b")
    # "b" found a prefix of "a" computed in the engine that kept it: the bits of eager products depend on how
    # many rows they have.
    tolerance = 1e-5 if kernels == "eager" else 0.0
    for client, other in zip((first, second), expected, strict=True):
        assert client.tokens == other.tokens
        np.testing.assert_allclose(client.logprobs, other.logprobs, rtol=0, atol=tolerance)
    check_engine(lending)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_weights_that_are_staged_meanwhile_serve_with_the_pages_that_come_back(kernels: Kernels) -> None:
    old, new = small_model(1), small_model(2)
    engine = small_engine(old, kernels=kernels, keep_spare=False)
    _session(engine, "a")
    engine.release_memory()
    serve(engine, new, 1)
    client = _session(engine, "b")
    client.check_logprobs(new)


def test_memory_is_given_back_and_taken_again() -> None:
    model = small_model(1)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    engine = small_engine(model, keep_spare=False)
    whole = held_bytes(engine)
    assert whole - weights > 10_000, "the rest is pages"
    engine.release_memory()
    assert held_bytes(engine) == weights
    engine.release_memory()
    engine.score(random_tokens(12, 0))
    assert held_bytes(engine) == whole
    engine.stage(engine.current(), {name: p.detach() for name, p in model.named_parameters()})
    assert held_bytes(engine) == whole + weights
    engine.activate(engine.current())
    assert held_bytes(engine) == whole, "what served before is let go"


def test_an_engine_that_keeps_its_spare_has_two_sets_from_the_second_update_on() -> None:
    model = small_model(1)
    engine = small_engine(model)
    before = held_bytes(engine)
    serve(engine, model, 1)
    assert held_bytes(engine) - before == sum(p.numel() * p.element_size() for p in model.parameters())


def test_nothing_is_given_back_while_a_session_is_held() -> None:
    engine = small_engine()
    client = Client("s", 0)
    client.ask(engine, prompt(8, 0), max_tokens=4)
    for _ in range(2):
        with pytest.raises(SamplerError, match="sessions are open"):
            engine.release_memory()
        drain(engine, [client])
    tokens = list(client.tokens)
    client.ask(engine, prompt(3, 1), max_tokens=2)
    drain(engine, [client])
    assert client.tokens[: len(tokens)] == tokens
    engine.close("s")
    engine.release_memory()


def test_nothing_is_given_back_in_the_midst_of_a_scoring() -> None:
    engine = small_engine()
    scoring = engine.begin_score(random_tokens(20, 0))
    with pytest.raises(SamplerError, match="pages are in use"):
        engine.release_memory()
    while not scoring.is_done:
        scoring.advance()
    engine.end_score(scoring)
    scores = scoring.scores().logprobs
    engine.release_memory()
    assert np.array_equal(engine.score(random_tokens(20, 0)).logprobs, scores)


def test_pages_of_draft_layers_go_and_come_with_the_others() -> None:
    model = small_model(3, head_dim=16)
    engines = [small_engine(model, drafts=MtpDrafts(draft_layers(model), 2)) for _ in range(2)]
    expected = [_session(engines[0], name).tokens for name in ("a", "b")]
    whole = held_bytes(engines[1])
    tokens = [_session(engines[1], "a").tokens]
    engines[1].release_memory()
    assert held_bytes(engines[1]) < whole
    tokens.append(_session(engines[1], "b").tokens)
    assert tokens == expected and held_bytes(engines[1]) == whole


def test_captured_steps_are_forgotten_with_the_pages_that_they_know() -> None:
    pytest.importorskip("triton")
    model = small_model(2)
    cache = PagedCache(small_config(), 4, torch.device("cpu"))
    forward = GpuForward(model, cache, run_uncaptured)
    forward._captured[1, 64] = object()  # type: ignore[assignment]
    cache.release()
    forward.load_cache()
    assert not forward._captured


def test_a_service_waits_for_sessions_that_close_and_refuses_for_others() -> None:
    async def body() -> None:
        engine = small_engine()
        async with EngineService(engine, MemoryWeights().fetch, 4) as service:
            first = Client("a", 0)
            service.open("a")
            async for chunk in service.stream(first.request(prompt(5, 0), max_tokens=3)):
                first.take(chunk)
            with pytest.raises(SamplerError, match="sessions are open"):
                await service.release_memory()
            service.close("a")
            await service.release_memory()
            assert engine.num_live_sessions == 0 and not engine._cache.is_allocated
            await service.release_memory()
            service.open("c")
            last = Client("c", 2)
            async for chunk in service.stream(last.request(prompt(5, 0), max_tokens=3)):
                last.take(chunk)
            assert engine._cache.is_allocated and len(last.tokens) == 8
            service.close("c")

    asyncio.run(asyncio.wait_for(body(), 60.0))
