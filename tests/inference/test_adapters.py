"""Adapters in the engine: the bits of the trainer's module, whatever adapters the neighbours use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.config import AdapterConfig
from etude.errors import SamplerError, WeightUpdateError
from etude.inference import Engine
from etude.inference.cache import PagedCache
from etude.inference.forward import EagerForward
from etude.inference.native import NativeForward
from etude.model import LanguageModel
from etude.model.kernels.invariant import InvariantOps
from etude.model.lora import Adapters, pairs_of
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion
from tests.inference.builders import ALL_KERNELS, Client, deliver, held_bytes, needs_compiler, prompt
from tests.inference.invariants import check_engine
from tests.inference.native_steps import cache_for, random_sequences
from tests.model.builders import LATENT, VOCAB, small_model

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "qwen3", "intermediate_size": 72},
    "experts": {},
    "latent": LATENT,
    "latent_direct": {**LATENT, "q_lora_rank": 0},
}


def adapted(changes: dict[str, Any], seed: int, rank: int = 3) -> tuple[LanguageModel, Adapters]:
    """The same base for every seed, with adapters of their own that have moved."""
    model = small_model(**changes)
    adapters = Adapters(model, AdapterConfig(rank=rank, alpha=6.0, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    return model, adapters


def put_in(engine: Engine, name: str, step: int, model: LanguageModel, adapters: Adapters) -> PolicyVersion:
    """Brings one version of an adapter into service; the base is the same for all."""
    version = PolicyVersion(name, step, f"{name}{step}", adapter=name)
    tensors: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    engine.stage(version, {**tensors, **adapters.published()}, "base")
    engine.activate(version)
    return version


def test_factors_in_service_are_no_views_of_those_that_were_given() -> None:
    """Who fetches them may use their memory for the next version."""
    model, adapters = adapted(MODELS["dense"], 1)
    pairs = pairs_of({name: tensor.clone() for name, tensor in adapters.published().items()})
    packed = EagerForward(model, PagedCache(model.config, 1)).pack_adapter(pairs)
    for left, right in pairs.values():
        left.zero_(), right.zero_()
    assert len(packed) == len(pairs)
    assert all(left.any() and right.any() for left, right in packed.values())


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
def test_native_rows_have_the_trainers_bits_whatever_their_neighbours_use(name: str) -> None:
    """Four sequences, with two adapters of different ranks and with none, cut into steps in three ways."""
    changes = MODELS[name]
    sides = [adapted(changes, 1), adapted(changes, 2, rank=5)]
    plain = small_model(**changes)
    lengths, wanted = (21, 40, 33, 9), []
    given, own = random_sequences(lengths, VOCAB).tokens, (0, 1, -1, 0)
    for tokens, slot in zip(given, own, strict=True):
        model = plain if slot < 0 else sides[slot][0]
        model.ops = InvariantOps()
        wanted.append(score_sequences(model, [tokens.astype(np.int32)])[0])
    assert not np.array_equal(wanted[0], score_sequences(plain, [given[0].astype(np.int32)])[0])
    for cut, threads in ((100, 1), (7, 2), (1, 2)):
        cache, engine_model = cache_for(plain), small_model(**changes)
        forward = NativeForward(engine_model, cache, threads)
        published = [adapters.published() for _, adapters in sides]
        forward.use_adapters([forward.pack_adapter(pairs_of(tensors)) for tensors in published])
        sequences = random_sequences(lengths, VOCAB)
        got: list[list[Tensor]] = [[] for _ in lengths]
        while any(sequences.computed[s] < n for s, n in enumerate(lengths)):
            counts = {s: min(cut, n - sequences.computed[s]) for s, n in enumerate(lengths)}
            counts = {s: n for s, n in counts.items() if n}
            rows = replace(sequences.take(counts), adapters=np.array([own[s] for s in counts]))
            hidden, _ = forward(rows)
            for (s, _), part in zip(counts.items(), hidden.split(list(counts.values())), strict=True):
                got[s].append(part)
        for s, parts in enumerate(got):
            logits = forward.logits(torch.cat(parts)[:-1])
            chosen = plain.ops.log_softmax(logits).gather(1, torch.from_numpy(given[s][1:, None]))
            np.testing.assert_array_equal(chosen.flatten().numpy(), wanted[s][1:], err_msg=f"{s} {cut}")


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_sessions_of_several_adapters_sample_side_by_side(kernels: Any, name: str) -> None:
    """Every token has the log-probability of its own adapter, though all have the same prompt; a new version
    of one adapter leaves the sessions of the other alone."""
    changes = MODELS[name]
    sides = {"a": adapted(changes, 1), "b": adapted(changes, 2)}
    engine = Engine(sides["a"][0].config, VOCAB, 6, 100, 64, kernels)
    versions = {name: put_in(engine, name, 0, *side) for name, side in sides.items()}
    given, clients = prompt(40, 1), {}
    for number, name in enumerate(("a", "b", "a", "b")):
        client = Client(f"{name}{number}", number)
        engine.submit(client.request(given, max_tokens=8, version=versions[name]))
        clients[client.name] = client
    run(engine, clients)
    for client in clients.values():
        check(client, sides[client.name[0]][0], versions[client.name[0]])
    assert engine.counters.cached_tokens > 0, "sessions of one adapter share the prompt"
    before = engine.counters.cached_tokens
    sides["a"] = adapted(changes, 3)
    versions["a"] = put_in(engine, "a", 1, *sides["a"])
    for number, name in enumerate(("a", "b")):
        client = clients[f"again {name}"] = Client(f"again {name}", 7 + number)
        engine.submit(client.request(given, max_tokens=8, version=versions[name]))
    fresh = {name: client for name, client in clients.items() if name.startswith("again")}
    run(engine, fresh)
    for name, client in fresh.items():
        check(client, sides[name[-1]][0], versions[name[-1]])
    assert 32 <= engine.counters.cached_tokens - before < 40, (
        "b's pages are still b's, a's are another version's"
    )
    check_engine(engine)


def run(engine: Engine, clients: dict[str, Client]) -> None:
    while engine.has_work:
        for answer in engine.step(8):
            deliver(clients, answer)


def check(client: Client, model: LanguageModel, version: PolicyVersion) -> None:
    assert set(client.versions.values()) == {version} and sum(client.sampled) == 8
    client.check_logprobs(model)


def test_a_session_that_goes_on_with_another_adapter_has_its_keys_computed_anew() -> None:
    sides = {"a": adapted({}, 1), "b": adapted({}, 2)}
    engine = Engine(sides["a"][0].config, VOCAB, 2, 100)
    versions = {name: put_in(engine, name, 0, *side) for name, side in sides.items()}
    client = Client("one", 1)
    for name, suffix in (("a", prompt(20, 1)), ("b", [5, 6])):
        engine.submit(client.request(suffix, max_tokens=4, version=versions[name]))
        run(engine, {"one": client})
    wanted = score_sequences(sides["b"][0], [np.array(client.tokens, dtype=np.int32)])[0]
    np.testing.assert_allclose(client.logprobs[-4:], wanted[-4:], atol=1e-5)


def test_what_does_not_fit_is_refused_and_what_is_served_stays() -> None:
    model, adapters = adapted({}, 1)
    engine = Engine(model.config, VOCAB, 2, 100)
    served = put_in(engine, "a", 0, model, adapters)
    client = Client("one", 1)
    with pytest.raises(SamplerError, match="not served"):
        engine.submit(client.request([1, 2], max_tokens=2, version=replace(served, adapter="b")))
    other = adapted({"hidden_size": 48}, 1)[1]
    with pytest.raises(WeightUpdateError, match="another model"):
        put_in(engine, "b", 0, model, other)
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    with pytest.raises(WeightUpdateError, match="names an adapter"):
        engine.stage(PolicyVersion("b", 0, adapter="b"), tensors, "base")
    assert engine.current() == served


def test_a_new_version_of_an_adapter_leaves_the_base_where_it_lies() -> None:
    model, adapters = adapted({}, 1)
    engine = Engine(model.config, VOCAB, 2, 100)
    put_in(engine, "a", 0, model, adapters)
    lying, held = engine.model, held_bytes(engine)
    put_in(engine, "a", 1, model, adapted({}, 2)[1])
    assert engine.model is lying and held_bytes(engine) == held
