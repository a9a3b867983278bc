"""The parity report of trainer and engine for one model, outside of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from etude.config import RunConfig
from etude.controller.parity_report import (
    REPLAYED,
    SAMPLED,
    SCORED,
    ParityReport,
    PlayedSequence,
    compare,
    measure_parity,
    play,
    random_prompts,
    text_prompts,
)
from etude.errors import ConfigError
from etude.inference import EngineService
from etude.model import LanguageModel, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.loading import AnyModel, save_any_model
from etude.model.ops import Ops, TorchOps
from etude.training.parity import compare_logprobs
from etude.weights import MemoryWeights
from tests.controller.test_vllm_run import fake_vllm, glm_model, small_model
from tests.inference.builders import needs_compiler, small_engine
from tests.model.builders import VOCAB, small_config

DENSE: dict[str, Any] = {"architecture": "qwen3", "intermediate_size": 40, "tie_embeddings": False}
LATENT: dict[str, Any] = {"architecture": "deepseek_v3", "kv_lora_rank": 16, "first_k_dense_replace": 1}
PROMPTS = random_prompts(VOCAB, 3, 0)


def model_of(**shape: Any) -> LanguageModel:
    model = build_model(small_config(**shape), VOCAB)
    model.initialise(3)
    return model


def measure(model: LanguageModel, **sections: Any) -> ParityReport:
    config = RunConfig.model_validate({"device": "cpu", **sections})
    return asyncio.run(measure_parity(model, config, PROMPTS, 40))


@needs_compiler
@pytest.mark.parametrize("shape", [{}, DENSE, LATENT])
def test_invariant_sides_are_equal_in_every_comparison(shape: dict[str, Any]) -> None:
    report = measure(model_of(**shape), numerics="invariant")
    assert report.passes(0.0, exact=True)
    assert report.figures[SAMPLED].num_tokens == 3 * 24
    assert report.figures[SCORED].num_tokens == 3 * 39
    assert report.routes_differing == (None if shape is DENSE else 0.0)


@needs_compiler
def test_weights_in_bfloat16_stay_within_the_gate_and_not_within_float32() -> None:
    report = measure(model_of(), engine={"kernels": "native", "weight_dtype": "bfloat16"})
    assert report.passes(1e-3)
    assert not report.passes(1e-6)


def test_a_cache_in_bfloat16_is_judged_as_it_serves() -> None:
    exact = measure(model_of(), engine={"kernels": "eager"}).figures[SAMPLED]
    report = measure(model_of(), engine={"kernels": "eager", "cache_dtype": "bfloat16"})
    assert report.passes(1e-3)
    assert report.figures[SAMPLED].max > 100 * exact.max


@pytest.mark.parametrize("shape", [{}, DENSE, LATENT])
def test_fast_sides_agree_within_float32_and_not_exactly(shape: dict[str, Any]) -> None:
    report = measure(model_of(**shape), engine={"kernels": "eager"})
    assert report.passes(1e-6)
    assert not report.passes(1e-6, exact=True)
    replayed = {SCORED + REPLAYED, SAMPLED + REPLAYED}
    assert set(report.figures) == {SCORED, SAMPLED} | (replayed if shape != DENSE else set())
    assert set(report.deciding) == (replayed if shape != DENSE else {SCORED, SAMPLED})


@needs_compiler
def test_the_size_of_a_micro_batch_changes_no_invariant_bit_and_some_of_others() -> None:
    model = model_of()
    played = play_here(model)
    fast = [compare(model, played, size).figures[SAMPLED] for size in (1, 3)]
    assert not any(figures.exact for figures in fast)
    model.ops = InvariantOps()
    for size in (1, 2, 3):
        assert compare(model, played, size).passes(0.0, exact=True)


def play_here(model: LanguageModel) -> list[PlayedSequence]:
    """Sessions in an engine with native kernels."""

    async def body() -> list[PlayedSequence]:
        engine = small_engine(model, kernels="native")
        async with EngineService(engine, MemoryWeights().fetch, None) as service:
            return await play(service, PROMPTS, 40)

    return asyncio.run(body())


def test_a_trainer_that_computes_otherwise_is_found_out() -> None:
    class Coarse(TorchOps):
        """Rounds logits to eighths."""

        def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
            return super().logits(hidden, head).mul(8).round().div(8)

        def logprobs(
            self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
        ) -> tuple[Tensor, Tensor]:
            return Ops.logprobs(self, hidden, head, tokens, temperature)

    model = model_of()
    model.ops = Coarse()
    report = measure(model, engine={"kernels": "eager"})
    assert not report.passes(1e-6)
    assert report.figures[SCORED].max > 0.01


def test_routes_decide_where_there_are_any() -> None:
    apart = compare_logprobs([np.array([0, -1.0])], [np.array([0, -3.0])])
    equal = compare_logprobs([np.array([0, -1.0])], [np.array([0, -1.0])])
    mixed = ParityReport({SCORED: apart, SCORED + REPLAYED: equal}, 0.25)
    assert mixed.passes(1e-3)
    assert not mixed.passes(1e-3, exact=True)
    assert not ParityReport({SCORED: apart}).passes(1e-3)
    assert mixed.to_json()["routes_differing"] == 0.25


def test_prompts_of_a_text_are_pieces_from_all_over_it() -> None:
    text = np.arange(100, dtype=np.int32)
    pieces = text_prompts(text, 4, 10)
    assert [piece.tolist() for piece in pieces] == [list(range(i, i + 10)) for i in (0, 25, 50, 75)]
    assert [len(piece) for piece in text_prompts(text, 50, 10)] == [2] * 50
    with pytest.raises(ConfigError, match="too short for 60 prompts"):
        text_prompts(text, 60, 10)


@pytest.mark.slow
@pytest.mark.parametrize("make", [small_model, glm_model])
def test_vllm_is_compared_as_our_engine_is(make: Callable[[int], AnyModel], tmp_path: Path) -> None:
    model = make(VOCAB)
    save_any_model(model, tmp_path / "first")
    with fake_vllm(tmp_path / "first") as url:
        engine = {"backend": "vllm", "vllm": {"url": url}}
        config = RunConfig.model_validate({"device": "cpu", "engine": engine})
        report = asyncio.run(measure_parity(model, config, PROMPTS, 40))
    assert report.passes(1e-6)
    assert report.figures[SAMPLED].num_tokens == 3 * 24
    assert SCORED + REPLAYED in report.figures and report.routes_differing == 0.0


def test_our_engine_refuses_an_architecture_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match="compare such a model with vLLM"):
        asyncio.run(measure_parity(glm_model(VOCAB), RunConfig(device="cpu"), PROMPTS, 40))
