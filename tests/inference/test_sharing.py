"""Prompts that begin alike are computed once: across sessions, in one step or later, and per version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etude.errors import ConfigError
from etude.inference import Engine
from etude.inference.engine import Kernels
from tests.inference.builders import ALL_KERNELS, Client, drain, prompt, serve, small_engine, version
from tests.inference.invariants import check_engine
from tests.model.builders import small_model


def _computed(engine: Engine) -> int:
    return engine.counters.prefill_tokens + engine.counters.decode_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("length", [9, 16, 17, 40, 64])
@pytest.mark.parametrize("prefill_tokens", [8, 256])
def test_samples_of_one_prompt_prefill_it_once(length: int, prefill_tokens: int, kernels: Kernels) -> None:
    model = small_model(1)
    engine = small_engine(model, num_sessions=8, prefill_tokens=prefill_tokens, kernels=kernels)
    clients = [Client(f"s{i}", i) for i in range(8)]
    for client in clients:
        client.ask(engine, prompt(length, 0), max_tokens=5)
    drain(engine, clients)
    check_engine(engine)
    assert _computed(engine) == length + 7 + 8 * 4, "once, its last token for each, and what each sampled"
    assert len({tuple(client.tokens) for client in clients}) > 1
    for client in clients:
        client.check(model)


def test_a_closed_session_leaves_its_prefix_to_others_with_its_routes() -> None:
    model = small_model(1)
    engine = small_engine(model)
    first, second = Client("first", 0), Client("second", 1)
    first.ask(engine, prompt(50, 0), max_tokens=8)
    drain(engine, [first])
    engine.close("first")
    before = _computed(engine)
    second.ask(engine, first.tokens[:55], max_tokens=4)
    drain(engine, [second])
    assert _computed(engine) - before == 1 + 3, "the prompt's last token, and all but one that were sampled"
    second.check(model)
    assert engine.counters.cached_tokens == 54


def test_prefixes_of_an_older_version_are_shared_with_nobody() -> None:
    old, new = small_model(1), small_model(2)
    engine = small_engine(old)
    first, second = Client("first", 0), Client("second", 1)
    first.ask(engine, prompt(50, 0))
    drain(engine, [first])
    serve(engine, new, 1, "keep")
    second.ask(engine, prompt(50, 0))
    drain(engine, [second])
    assert engine.counters.cached_tokens == 0
    second.check(new)
    first.ask(engine, prompt(2, 1))
    drain(engine, [first])
    assert {v.step for p, v in first.kv_oldest.items() if p > 56} == {0}, "its own, it may keep"


def test_a_session_that_mixes_versions_shares_nothing() -> None:
    old, new = small_model(1), small_model(2)
    engine = small_engine(old)
    mixed, other = Client("mixed", 0), Client("other", 1)
    mixed.ask(engine, prompt(20, 0), max_tokens=40)
    for _ in range(5):
        engine.step()
    serve(engine, new, 1, "keep")
    drain(engine, [mixed])
    other.ask(engine, mixed.tokens[:50])
    drain(engine, [other])
    assert engine.counters.cached_tokens == 0
    other.check(new)


@pytest.mark.parametrize("end", ["abort", "close"])
def test_whoever_waits_for_a_prompt_computes_it_when_its_owner_is_gone(end: str) -> None:
    model = small_model(1)
    engine = small_engine(model, prefill_tokens=8)
    owner, waiting = Client("owner", 0), Client("waiting", 1)
    request = owner.ask(engine, prompt(60, 0))
    waiting.ask(engine, prompt(60, 0))
    for _ in range(3):
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    if end == "abort":
        assert engine.abort(request.id) is not None
    else:
        engine.close("owner")
    drain(engine, [waiting])
    check_engine(engine)
    waiting.check(model)
    assert _computed(engine) < 24 + 60 + 6, "what was there, served"


def test_whoever_waits_for_a_prompt_computes_it_when_its_owner_is_preempted() -> None:
    model = small_model(1)
    engine = small_engine(model, num_sessions=4, max_tokens=80, prefill_tokens=4, num_pages=6)
    old, owner, waiting = Client("old", 0), Client("owner", 1), Client("waiting", 2)
    old.ask(engine, prompt(17, 5), max_tokens=60)
    engine.step()
    owner.ask(engine, prompt(40, 0), max_tokens=4)
    waiting.ask(engine, prompt(40, 0), max_tokens=4)
    drain(engine, [old, owner, waiting])
    check_engine(engine)
    for client in (old, owner, waiting):
        client.check(model)


def test_idle_sessions_lose_their_pages_before_a_request_waits_and_are_no_miss() -> None:
    model = small_model(1)
    engine = small_engine(model, num_sessions=4, max_tokens=64, num_pages=5)
    idle, busy = Client("idle", 0), Client("busy", 1)
    idle.ask(engine, prompt(40, 0))
    drain(engine, [idle])
    busy.ask(engine, prompt(50, 1))
    drain(engine, [busy])
    assert engine.counters.preemptions == 0
    idle.ask(engine, prompt(3, 2))
    drain(engine, [idle])
    assert idle.misses == 0
    idle.check(model)
    check_engine(engine)


def test_a_prompt_that_cannot_be_placed_yet_costs_nobody_what_is_kept() -> None:
    engine = small_engine(small_model(1), num_sessions=4, max_tokens=96, num_pages=9)
    kept, running, large, again = (Client(f"s{i}", i) for i in range(4))
    kept.ask(engine, prompt(30, 0), max_tokens=3)
    drain(engine, [kept])
    engine.close(kept.name)
    running.ask(engine, prompt(50, 1), max_tokens=20)
    engine.step()
    large.ask(engine, prompt(90, 2), max_tokens=2)
    for _ in range(4):
        engine.step()
    assert engine.num_waiting == 1
    assert engine.abort(f"{large.name}:1") is not None
    again.ask(engine, prompt(30, 0), max_tokens=3)
    drain(engine, [running, again])
    assert engine.counters.cached_tokens == 29
    check_engine(engine)


def test_too_few_pages_for_one_session_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        small_engine(max_tokens=100, num_pages=6)
    assert caught.value.field == "num_pages"
    assert "7" in str(caught.value.fix)


def test_the_load_counts_who_runs_and_who_waits() -> None:
    engine = small_engine(num_sessions=2)
    clients = [Client(f"s{i}", i) for i in range(3)]
    for i, client in enumerate(clients):
        client.ask(engine, prompt(10 + i, i), max_tokens=5)
    assert (engine.num_running, engine.num_waiting) == (0, 3)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    drain(engine, clients)
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_routes_of_more_than_255_experts_have_two_bytes() -> None:
    model = small_model(1, num_experts=300, experts_per_token=3, expert_size=4)
    engine = small_engine(model)
    client = Client("s", 0)
    client.ask(engine, prompt(12, 0))
    drain(engine, [client])
    assert client.routes[0].dtype == np.uint16
    assert max(int(row.max()) for row in client.routes.values()) > 255
    client.check(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "qwen3"},
        {"architecture": "deepseek_v3", "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    ],
)
def test_other_architectures_are_served_alike(changes: dict[str, Any]) -> None:
    model = small_model(1, **changes)
    engine = small_engine(model, prefill_tokens=7)
    clients = [Client(f"s{i}", i) for i in range(3)]
    for turn in range(2):
        for i, client in enumerate(clients):
            client.ask(engine, prompt(20 + 3 * i, turn), max_tokens=9)
        drain(engine, clients)
    check_engine(engine)
    for client in clients:
        if model.config.num_moe_layers:
            client.check(model)
        else:
            assert client.routes == {}
            client.check_logprobs(model)
    serve(engine, small_model(2, **changes), 1, "recompute")
    assert engine.version is not None
    assert engine.version.step == version(1).step
