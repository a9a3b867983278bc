"""Weights change between two steps: versions, keys, values and routes stay accounted for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.errors import SamplerError, WeightUpdateError
from etude.inference import Engine
from etude.inference.engine import Kernels
from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from tests.inference.builders import (
    ALL_KERNELS,
    Client,
    deliver,
    drain,
    fresh_routes,
    prompt,
    serve,
    small_engine,
    version,
)
from tests.model.builders import small_model

_BEFORE, _AFTER = 5, 7
"""Tokens sampled before and after the swap."""


def _models() -> tuple[LanguageModel, LanguageModel]:
    return small_model(1), small_model(2)


def _run_with_swap(
    kv: str, old: LanguageModel, new: LanguageModel, kernels: Kernels = "eager"
) -> tuple[Engine, Client]:
    engine = small_engine(old, kernels=kernels)
    client = Client("s", 0)
    client.ask(engine, prompt(8, 0), max_tokens=_BEFORE + _AFTER)
    for _ in range(_BEFORE):
        assert engine.step() == []
    serve(engine, new, 1, kv)
    drain(engine, [client])
    return engine, client


def _steps(versions: dict) -> list[int]:
    return [versions[position].step for position in sorted(versions)]


def test_keeping_keys_gives_each_token_its_own_version_and_the_oldest_keys() -> None:
    _, client = _run_with_swap("keep", *_models())
    assert _steps(client.versions) == [0] * _BEFORE + [1] * _AFTER
    assert _steps(client.kv_oldest) == [0] * (_BEFORE + _AFTER)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_kept_routes_are_those_of_the_weights_that_computed_the_keys(kernels: Kernels) -> None:
    old, new = _models()
    _, client = _run_with_swap("keep", old, new, kernels)
    tokens = np.array(client.tokens, dtype=np.int32)
    computed_by_old = 8 + _BEFORE - 1
    routes = np.stack([client.routes[position] for position in range(len(tokens) - 1)])
    np.testing.assert_array_equal(routes[:computed_by_old], fresh_routes(old, tokens)[:computed_by_old])
    assert (routes[computed_by_old:] != fresh_routes(old, tokens)[computed_by_old:-1]).any()


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_recomputing_makes_the_rest_of_a_message_a_fresh_run_of_the_new_weights(kernels: Kernels) -> None:
    old, new = _models()
    engine, client = _run_with_swap("recompute", old, new, kernels)
    tokens = np.array(client.tokens, dtype=np.int32)
    swap = 8 + _BEFORE
    logprobs = np.array(client.logprobs)
    np.testing.assert_allclose(logprobs[swap:], score_sequences(new, [tokens])[0][swap:], atol=1e-5)
    np.testing.assert_allclose(logprobs[8:swap], score_sequences(old, [tokens])[0][8:swap], atol=1e-5)
    assert np.abs(score_sequences(new, [tokens])[0] - score_sequences(old, [tokens])[0]).max() > 0.1
    routes = np.stack([client.routes[position] for position in range(len(tokens) - 1)])
    np.testing.assert_array_equal(routes, fresh_routes(new, tokens)[:-1])
    assert _steps(client.versions) == [0] * _BEFORE + [1] * _AFTER
    assert _steps(client.kv_oldest) == [0] * _BEFORE + [1] * _AFTER
    client.ask(engine, prompt(3, 1))
    drain(engine, [client])
    assert client.misses == 0
    np.testing.assert_allclose(
        np.array(client.logprobs)[-6:], score_sequences(new, [_array(client)])[0][-6:], atol=1e-5
    )


def test_an_idle_session_is_recomputed_with_its_next_request() -> None:
    old, new = _models()
    engine = small_engine(old, prefill_tokens=5)
    client = Client("s", 0)
    client.ask(engine, prompt(8, 0))
    drain(engine, [client])
    serve(engine, new, 1, "recompute")
    client.ask(engine, prompt(3, 1))
    drain(engine, [client])
    np.testing.assert_array_equal(
        np.stack([client.routes[i] for i in range(len(client.tokens) - 1)]),
        fresh_routes(new, _array(client))[:-1],
    )
    assert _steps(client.kv_oldest) == [0] * 6 + [1] * 6


def test_an_idle_session_keeps_old_keys_and_says_so() -> None:
    old, new = _models()
    engine = small_engine(old)
    client = Client("s", 0)
    client.ask(engine, prompt(8, 0))
    drain(engine, [client])
    serve(engine, new, 1, "keep")
    client.ask(engine, prompt(3, 1))
    drain(engine, [client])
    assert _steps(client.versions) == [0] * 6 + [1] * 6
    assert _steps(client.kv_oldest) == [0] * 12


def test_a_session_begun_after_the_swap_holds_nothing_old() -> None:
    old, new = _models()
    engine = small_engine(old)
    running, later = Client("running", 0), Client("later", 1)
    running.ask(engine, prompt(8, 0))
    engine.step()
    serve(engine, new, 1, "keep")
    later.ask(engine, prompt(8, 1))
    drain(engine, [running, later])
    later.check(new)
    assert _steps(later.kv_oldest) == [1] * 6


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_swaps_before_the_first_token_give_no_empty_spans(kv: str) -> None:
    old, new = _models()
    engine = small_engine(old, prefill_tokens=3)
    client = Client("s", 0)
    client.ask(engine, prompt(8, 0))
    engine.step()
    serve(engine, new, 1, kv)
    serve(engine, old, 2, kv)
    answers = drain(engine, [client])
    assert [len(chunk.tokens) for chunk in answers[0].chunks] == [6]
    assert _steps(client.versions) == [2] * 6
    assert _steps(client.kv_oldest) == [0 if kv == "keep" else 2] * 6


def test_many_swaps_give_one_chunk_per_version_in_order() -> None:
    models = [small_model(seed) for seed in range(4)]
    engine = small_engine(models[0])
    client, by_name = Client("s", 0), {}
    by_name["s"] = client
    client.ask(engine, prompt(8, 0), max_tokens=9)
    step = 0
    while engine.has_work:
        for answer in engine.step():
            deliver(by_name, answer)
            assert [chunk.finish for chunk in answer.chunks] == [None, None, None, "length"]
        if engine.counters.steps % 2 == 0 and step < 3:
            step += 1
            serve(engine, models[step], step, "recompute" if step == 2 else "keep")
    assert _steps(client.versions) == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert _steps(client.kv_oldest) == [0, 0, 0, 0, 2, 2, 2, 2, 2]


def test_a_refused_update_leaves_the_old_version_serving() -> None:
    old, new = _models()
    engine = small_engine(old)
    good = {name: parameter.detach() for name, parameter in new.named_parameters()}
    missing = {name: tensor for name, tensor in good.items() if name != "final_norm"}
    wrong_shape = good | {"final_norm": torch.ones(7)}
    for tensors, field in ((missing, "tensors"), (wrong_shape, "final_norm")):
        with pytest.raises(WeightUpdateError) as caught:
            engine.stage(version(1), tensors)
        assert caught.value.field == field
    with pytest.raises(WeightUpdateError, match="not staged"):
        engine.activate(version(1))
    engine.stage(version(1), good)
    with pytest.raises(WeightUpdateError, match="not staged"):
        engine.activate(version(2))
    client = Client("s", 0)
    client.ask(engine, prompt(8, 0))
    drain(engine, [client])
    client.check(old)
    assert _steps(client.versions) == [0] * 6
    assert engine.counters.weight_updates == 1


def test_a_version_is_activated_once_and_old_pins_are_refused_then() -> None:
    old, new = _models()
    engine = small_engine(old)
    served = serve(engine, new, 1)
    with pytest.raises(WeightUpdateError, match="not staged"):
        engine.activate(served)
    with pytest.raises(SamplerError, match="version"):
        engine.submit(Client("s", 0).request([1, 2], version=version(0)))
    engine.submit(Client("s", 0).request([1, 2], version=version(0), version_is_minimum=True))


def _array(client: Client) -> np.ndarray:
    return np.array(client.tokens, dtype=np.int32)
