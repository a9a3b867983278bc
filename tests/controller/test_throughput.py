from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from etude.controller.throughput import Snapshot, split_step_times, throughput_figures
from etude.environment.runners import EnvironmentTimes
from etude.inference import EngineCounters, ServiceTimes, StepSums


class Measured:
    """Parts and loop whose clocks and counters are set by hand."""

    def __init__(self) -> None:
        self.counters, self.times, self.environment = EngineCounters(), ServiceTimes(), EnvironmentTimes()
        self.parts = cast(
            Any,
            SimpleNamespace(
                service=SimpleNamespace(counters=self.counters, times=self.times),
                environment=SimpleNamespace(times=self.environment),
            ),
        )
        self.loop = cast(
            Any,
            SimpleNamespace(
                utilisation=SimpleNamespace(busy_share=0.18, total={"train": 0.5, "publish": 0.125}),
                times=SimpleNamespace(elapsed_s=25.0, rollout_s=20.0, train_s=4.0, train_tokens=8_000.0),
            ),
        )

    def snapshot(self) -> Snapshot:
        return Snapshot.of(self.parts, self.loop)


def test_rates_are_tokens_over_the_time_that_was_spent_on_them() -> None:
    measured = Measured()
    measured.counters.decode_tokens = 77
    measured.times.step_s = 99.0
    measured.times.steps.add(77, 0, 99.0)
    began = measured.snapshot()
    measured.counters.decode_tokens += 6_000
    measured.counters.prefill_tokens += 30_000
    measured.times.step_s += 10.0
    counted = StepSums()
    for _ in range(100):
        for cost in ((50, 0, 0.05), (10, 300, 0.05)):
            counted.add(*cost)
            measured.times.steps.add(*cost)
            measured.counters.steps += 1
    measured.times.waiting_s += 1.25
    measured.environment.num_episodes += 64
    measured.loop.utilisation.total = {"train": 4.5, "publish": 0.625, "parity": 0.25}
    figures = throughput_figures(began, measured.snapshot(), measured.loop)
    decode_s, prefill_s = split_step_times(counted, 10.0)
    assert decode_s + prefill_s == pytest.approx(10.0)
    assert figures["decode_tokens_per_s"] == pytest.approx(6_000 / decode_s)
    assert figures["prefill_tokens_per_s"] == pytest.approx(30_000 / prefill_s)
    assert figures["engine_tokens_per_s"] == pytest.approx(3_600)
    assert (figures["trainer_busy_share"], figures["engine_busy_share"]) == (0.18, 0.4)
    assert figures["sampled_tokens_per_rollout_s"] == pytest.approx(300)
    assert figures["training_tokens_per_s"] == pytest.approx(2_000)
    assert (figures["decode_tokens"], figures["prefill_tokens"]) == (6_000, 30_000)
    assert (figures["episodes"], figures["waiting_for_tools_s"]) == (64.0, 1.25)
    assert (figures["publish_s"], figures["parity_s"]) == (0.5, 0.25)


def test_of_an_engine_that_counts_no_steps_only_tokens_are_told() -> None:
    measured = Measured()
    began = measured.snapshot()
    measured.counters.decode_tokens += 6_000
    measured.counters.cached_tokens += 40
    figures = throughput_figures(began, measured.snapshot(), measured.loop)
    assert figures["sampled_tokens_per_rollout_s"] == pytest.approx(300)
    assert (figures["decode_tokens"], figures["cached_tokens"]) == (6_000, 40)
    assert not {"engine_s", "engine_busy_share", "decode_tokens_per_s"} & figures.keys()


def test_a_step_s_time_is_shared_out_by_what_decoding_and_prefill_cost() -> None:
    source = np.random.default_rng(0)
    decoded = source.integers(0, 100, 400)
    prefilled = source.integers(0, 2, 400) * source.integers(1, 500, 400)
    decode = np.where(decoded > 0, 1e-3 + 5e-5 * decoded, 0.0)
    prefill = np.where(prefilled > 0, 2e-3 + 2e-5 * prefilled, 0.0) + 1e-3 * (decoded == 0)
    steps = StepSums()
    for cost in zip(decoded.tolist(), prefilled.tolist(), (decode + prefill).tolist(), strict=True):
        steps.add(*cost)
    decode_s, prefill_s = split_step_times(steps, float((decode + prefill).sum()))
    assert decode_s == pytest.approx(decode.sum(), rel=0.01)
    assert prefill_s == pytest.approx(prefill.sum(), rel=0.01)


def test_nothing_done_is_no_division_by_zero() -> None:
    measured = Measured()
    measured.loop.times.elapsed_s = measured.loop.times.rollout_s = measured.loop.times.train_s = 0.0
    figures = throughput_figures(measured.snapshot(), measured.snapshot(), measured.loop)
    assert {value for name, value in figures.items() if name.endswith("_per_s")} == {0.0}
