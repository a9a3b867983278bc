"""The gate between trainer and engine: in the loop, with real sides, and in whole runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from etude.config import RunConfig
from etude.controller.compute import resolve_numerics
from etude.controller.local import LocalHandle
from etude.controller.parity import ParityGate
from etude.controller.publication import Publication
from etude.controller.starting import check_start
from etude.errors import ConfigError, ParityError, ResourceError, SamplerError
from etude.inference import EngineService
from etude.inference.engine import Kernels
from etude.model import LanguageModel, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.observe.metrics import read_metrics
from etude.observe.observer import RecordingObserver
from etude.records import PolicyVersion, Scores
from etude.training import RlTrainer
from etude.weights import MemoryWeights
from tests.controller.looping import World
from tests.controller.running import run_here, tiny_config
from tests.inference.builders import needs_compiler, small_engine
from tests.model.builders import VOCAB, random_tokens, small_config

V1 = PolicyVersion("run", 1)
DENSE: dict[str, Any] = {"architecture": "qwen3", "intermediate_size": 40, "tie_embeddings": False}
PROMPTS = [random_tokens(length, length) for length in (9, 30, 14)]


class Side:
    """Implements what the gate asks of either side: log-probabilities of -1, plus `error` at each token."""

    def __init__(self, error: float = 0.0, version: PolicyVersion | None = None) -> None:
        self.error, self.version = error, version
        self.scored: list[int] = []

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        self.scored.append(len(tokens))
        return Scores(np.full(len(tokens), -1.0, dtype=np.float32), version)


class TrainerSide(Side):
    def score(self, sequences: Sequence[NDArray[np.int32]], routes: Any = None) -> list[Scores]:  # type: ignore[override]
        assert routes is None, "nothing was recorded"
        values = [np.full(len(tokens), -1.0 + self.error, dtype=np.float32) for tokens in sequences]
        return [Scores(one, self.version or V1) for one in values]


def gate_of(error: float = 0.0, observer: RecordingObserver | None = None, **parity: Any) -> ParityGate:
    trainer, numerics = TrainerSide(error), parity.pop("numerics", "fast")
    config = RunConfig.model_validate({"parity": parity, "numerics": numerics})
    return ParityGate(config, LocalHandle(trainer), Side(), observer or RecordingObserver(), PROMPTS)  # type: ignore[arg-type]


def check(gate: ParityGate) -> None:
    figures = asyncio.run(gate.measure(V1))
    assert figures is not None
    gate.judge(figures, V1)


def test_sides_that_agree_pass() -> None:
    gate = gate_of()
    check(gate)
    assert gate.worst == {"k3": 0.0, "p99": 0.0, "max": 0.0, "checks": 1.0}


def test_sides_that_differ_end_the_run_with_the_figure_and_what_to_look_for() -> None:
    gate = gate_of(error=0.5)
    with pytest.raises(ParityError, match=r"run@1.*k3 0\.149.*99 % within 0\.5.*50 tokens") as caught:
        check(gate)
    assert (caught.value.field, caught.value.received) == ("parity.limit", 1e-3)
    assert "etude doctor parity" in str(caught.value.fix)
    assert gate.worst["failed"] == 1.0


def test_the_limit_is_a_choice() -> None:
    check(gate_of(error=0.5, limit=0.15))
    with pytest.raises(ParityError):
        check(gate_of(error=0.5, limit=0.148))


def test_a_warning_says_the_same_and_goes_on() -> None:
    observer = RecordingObserver()
    gate = gate_of(error=0.5, observer=observer, on_failure="warn")
    check(gate)
    check(gate)
    assert gate.worst["failed"] == gate.worst["checks"] == 2.0
    assert all("too far apart" in line for line in observer.lines)
    assert len(observer.lines) == 2


def test_invariant_numerics_let_no_difference_pass() -> None:
    check(gate_of(numerics="invariant"))
    with pytest.raises(ParityError, match="requires equal bits"):
        check(gate_of(error=1e-6, numerics="invariant"))


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_what_is_no_number_fails_and_does_not_reach_the_report(error: float) -> None:
    gate = gate_of(error=error, on_failure="warn")
    check(gate)
    assert gate.worst == {"failed": 1.0, "checks": 1.0}


def test_it_scores_no_more_than_it_may() -> None:
    gate = gate_of(num_sequences=2, max_tokens=20)
    asyncio.run(gate.measure(V1))
    assert gate._sampler.scored == [9, 11]  # type: ignore[attr-defined]


def test_without_sequences_there_is_no_gate() -> None:
    assert asyncio.run(gate_of(num_sequences=0).measure(V1)) is None


def test_sides_of_two_versions_are_not_compared() -> None:
    gate = gate_of()
    with pytest.raises(ParityError, match=r"another version.*run@1.*run@2"):
        asyncio.run(gate.measure(PolicyVersion("run", 2)))


def sampled(k3: float, largest: float, num_tokens: int = 1000) -> dict[str, float]:
    return {"parity_k3": k3, "parity_max": largest, "parity_tokens": num_tokens}


def test_tokens_as_they_were_decoded_are_judged_as_well() -> None:
    apart, tiny = sampled(0.02, 0.2), sampled(1e-14, 1e-7)
    gate_of().judge_sampled(tiny, 1)
    gate_of().judge_sampled({}, 1)
    gate_of(num_sequences=0).judge_sampled(apart, 1)
    for strict, metrics in ({}, apart), ({}, sampled(0.0, math.nan, 1)), ({"numerics": "invariant"}, tiny):
        with pytest.raises(ParityError, match=r"in step 7, over the tokens that the engine decoded"):
            gate_of(**strict).judge_sampled(metrics, 7)
    lenient = gate_of(on_failure="warn")
    lenient.judge_sampled(apart, 1)
    assert lenient.worst == {"sampled_failed": 1.0}


def test_few_decoded_tokens_are_judged_with_those_of_the_next_steps() -> None:
    """One improbable token among six, of weights rounded to bfloat16, stopped a run that was right."""
    gate = gate_of()
    gate.judge_sampled(sampled(1.01e-3, 0.108, 6), 1)
    gate.judge_sampled(sampled(1e-5, 0.03, 400), 2)
    few = sampled(2e-3, 0.2, 100)
    gate.judge_sampled(few, 3)
    gate.judge_sampled(few, 4)
    with pytest.raises(ParityError, match="in step 5"):
        gate.judge_sampled(few, 5)


# ---- real sides --------------------------------------------------------------------------------


def model_of(**shape: Any) -> LanguageModel:
    model = build_model(small_config(**shape), VOCAB)
    model.initialise(3)
    return model


async def compare(
    model: LanguageModel, kernels: Kernels, config: RunConfig, spoil: float = 0.0
) -> ParityGate:
    """One check of a real trainer and a real engine."""
    weights = MemoryWeights()
    trainer = RlTrainer(model, config.rl, "run", weights, lambda ref: np.zeros(0))
    engine = small_engine(model, kernels=kernels, prefill_tokens=16)
    async with EngineService(engine, weights.fetch) as service:
        manifest = trainer.publish()
        await service.stage(manifest)
        await service.activate(manifest.version)
        with torch.no_grad():
            model.embedding.add_(spoil * torch.randn_like(model.embedding))
        gate = ParityGate(config, LocalHandle(trainer), service, RecordingObserver(), PROMPTS)
        figures = await gate.measure(manifest.version)
        assert figures is not None
        assert figures.num_tokens == sum(len(tokens) - 1 for tokens in PROMPTS)
        gate.judge(figures, manifest.version)
    return gate


@needs_compiler
@pytest.mark.parametrize("shape", [{}, DENSE])
@pytest.mark.parametrize("replay", ["r3", "off"])
def test_invariant_sides_agree_in_every_bit(shape: dict[str, Any], replay: str) -> None:
    model = model_of(**shape)
    model.ops = InvariantOps()
    config = RunConfig.model_validate({"numerics": "invariant", "rl": {"router_replay": replay}})
    assert asyncio.run(compare(model, "native", config)).worst["max"] == 0.0


@pytest.mark.parametrize("kernels", ["eager", pytest.param("native", marks=needs_compiler)])
def test_fast_sides_agree_within_float32(kernels: Kernels) -> None:
    worst = asyncio.run(compare(model_of(), kernels, RunConfig())).worst
    assert 0.0 < worst["max"] < 1e-4
    assert worst["k3"] < 1e-9


def test_weights_that_are_not_those_in_service_are_found_out() -> None:
    with pytest.raises(ParityError, match="too far apart"):
        asyncio.run(compare(model_of(), "eager", RunConfig(), spoil=0.1))


# ---- in the loop -------------------------------------------------------------------------------


def gated(world: World, error: float) -> World:
    """The world's loop, with a gate whose sides differ by `error` at publication 1."""

    class Aware(Side):
        async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
            world.events.append(f"score {version.step}")
            return await super().score(tokens, version)

    class Trainer(TrainerSide):
        def score(self, sequences: Sequence[NDArray[np.int32]], routes: Any = None) -> list[Scores]:  # type: ignore[override]
            self.version, self.error = world.trainer.version, error * (world.trainer.version.step == 1)
            return super().score(sequences, routes)

    config = RunConfig.model_validate({"parity": {"num_sequences": 1}})
    gate = ParityGate(config, LocalHandle(Trainer()), Aware(), world.observer, PROMPTS)  # type: ignore[arg-type]
    publication = world.loop._publication
    assert isinstance(publication, Publication)
    world.loop._gate = publication._gate = gate
    return world


def test_each_publication_passes_the_gate_before_anything_is_sampled_or_saved(tmp_path: Path) -> None:
    world = gated(World(tmp_path), 0.0)
    world.run(1)
    assert world.events == [
        "publish 0", "serve 0", "score 0",
        "train 2", "publish 1", "serve 1", "score 1", "saved 1",
    ]  # fmt: skip
    rows = [row for row in world.metrics.rows if row["kind"] == "parity"]
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[0]["num_tokens"] == len(PROMPTS[0]) - 1
    assert rows[1]["num_tokens"] > rows[0]["num_tokens"], "then the rollouts are scored"


def test_weights_that_do_not_pass_are_neither_saved_nor_sampled_from(tmp_path: Path) -> None:
    world = gated(World(tmp_path), 0.5)
    with pytest.raises(ParityError):
        world.run(3)
    assert world.events[-1] == "score 1"
    assert [row["step"] for row in world.metrics.rows if row["kind"] == "parity"] == [0, 1], "it is on record"


def test_a_step_whose_tokens_were_decoded_wrongly_is_not_saved(tmp_path: Path) -> None:
    """Though the engine scores the same tokens rightly."""
    world = gated(World(tmp_path, parity=[0.01, 0.5]), 0.0)
    with pytest.raises(ParityError, match="step 2"):
        world.run(3)
    assert [event for event in world.events if event.startswith("saved")] == ["saved 1"]
    assert [row["step"] for row in world.metrics.rows if row["kind"] == "rl"] == [1, 2], "it is on record"


def test_an_engine_that_cannot_score_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    world = gated(World(tmp_path), 0.0)

    class Failing(Side):
        async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
            raise SamplerError("too few pages are free for scoring")

    assert world.loop._gate is not None
    world.loop._gate._sampler = Failing()  # type: ignore[assignment]
    with pytest.raises(SamplerError):
        world.run(1)


# ---- whole runs --------------------------------------------------------------------------------


def test_invariant_numerics_are_refused_where_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    for field, value in (
        ("backend", "vllm"),
        ("kernels", "eager"),
        ("cache_dtype", "bfloat16"),
        ("weight_dtype", "bfloat16"),
    ):
        with pytest.raises(ValueError, match=rf"engine\.{field}: must be .* with numerics"):
            RunConfig.model_validate({"numerics": "invariant", "engine": {field: value}})
    config = RunConfig.model_validate({"numerics": "invariant"})
    monkeypatch.setattr("etude.controller.compute.load_library", _no_compiler)
    with pytest.raises(ResourceError, match="no C compiler"):
        check_start(config)
    assert resolve_numerics(RunConfig()).engine.kernels == "auto", "fast numerics ask for nothing"


def _no_compiler() -> None:
    raise ResourceError("no C compiler", field="CC")


@needs_compiler
def test_invariant_operations_refuse_bfloat16() -> None:
    model = model_of().cast(torch.bfloat16)
    model.ops = InvariantOps()
    config = RunConfig.model_validate({"numerics": "invariant"})
    with pytest.raises(ResourceError, match="float32 on a CPU"):
        asyncio.run(compare(model, "native", config))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("shape", [{}, {"architecture": "qwen3", "intermediate_size": 64}])
def test_a_whole_run_in_invariant_numerics_has_no_difference_anywhere(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, numerics="invariant", model=shape, parity={"max_tokens": 600})
    run, report = run_here(config)
    assert report["parity"] == {"k3": 0.0, "max_abs_dlogp": 0.0}
    assert report["parity_gate"] == {"k3": 0.0, "p99": 0.0, "max": 0.0, "checks": 3.0}
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "parity"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["differing"] == 0.0 and row["num_tokens"] > 100 for row in rows)
    assert run.environment["kernels"] == "native"


@pytest.mark.slow
def test_a_run_that_does_not_pass_ends_and_goes_on_once_it_may(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, parity={"limit": 1e-30})
    with pytest.raises(ParityError, match="tiny@0"):
        run_here(config)
    lenient = config.model_copy(update={"parity": config.parity.model_copy(update={"on_failure": "warn"})})
    _, report = run_here(lenient, resume=True)
    assert report["rl_steps"] == 2
    assert report["parity_gate"]["failed"] == 3.0


def test_unknown_choices_are_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="on_failure"):
        RunConfig.model_validate({"parity": {"on_failure": "ignore"}})
