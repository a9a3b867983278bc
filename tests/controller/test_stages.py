"""An interrupted stage is saved and not finished."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from etude.config import CheckpointConfig, RunConfig
from etude.controller.next_token import AnyNextTokenTrainer
from etude.controller.stages import StageRunner
from etude.controller.stopping import StopSignal
from etude.controller.thread_choice import ThreadChoice
from etude.observe import JsonlSink
from etude.observe.observer import SilentObserver


class Counter:
    """Takes ten steps."""

    def __init__(self) -> None:
        self.num_steps_taken = 0
        self.saved: list[int] = []

    @property
    def finished(self) -> bool:
        return self.num_steps_taken == 10

    def step(self) -> dict[str, float]:
        self.num_steps_taken += 1
        return {"tokens": 1.0, "step_s": 1.0}

    def save(self, directory: Path, extra: Mapping[str, Any], write: Any) -> None:
        self.saved.append(extra["step"])


class Watcher(SilentObserver):
    """Keeps the steps that the progress line was given."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def stage_advances(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)


@pytest.mark.parametrize(("stop_at", "is_over"), [(4, False), (10, True), (99, True)])
def test_a_stage_is_over_with_its_last_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, is_over: bool
) -> None:
    trainer, checkpoint = Counter(), CheckpointConfig(every_s=1e9)
    monkeypatch.setattr(time, "monotonic", lambda: float(trainer.num_steps_taken))
    with JsonlSink(tmp_path / "rows") as rows, StopSignal(SilentObserver(), max_wall_s=stop_at) as stop:
        observer = Watcher()
        latest, threads = tmp_path / "latest", ThreadChoice(RunConfig(num_threads=1), nn.Module(), "sft")
        runner = StageRunner("sft", "sft", checkpoint, latest, stop, rows, observer, dict, threads)
        assert runner.run(cast(AnyNextTokenTrainer, trainer), 10, lambda _: None) is is_over
    assert trainer.saved == ([] if is_over else [4])
    assert observer.steps == list(range(1, min(stop_at, 10) + 1)), "steps of a large model take long"
