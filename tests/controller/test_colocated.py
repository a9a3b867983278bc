"""Trainer and engine have one device in turn: the same bits with less memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from etude.config import RunConfig
from etude.controller.colocated import ColocatedTrainer
from etude.controller.local import LocalHandle
from etude.controller.training_part import TrainingPart
from etude.errors import SamplerError
from etude.native import find_compiler
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver
from tests.controller.running import collected, final_weights, run_here, tiny_config

KERNELS = "native" if find_compiler() is not None else "eager"
ADAPTED = {"adapter": {"rank": 4}}
MUON = {"optimizer": {"matrix_optimizer": "muon"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "rl"),
    [(KERNELS, {}), ("eager", ADAPTED | MUON)],
)
def test_a_colocated_run_gives_the_weights_and_sessions_of_one_that_is_not(
    tmp_path: Path, kernels: str, rl: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {"engine": {"num_slots": 16, "kernels": kernels}, "rl": rl}
    apart, plain_report = run_here(tiny_config(tmp_path / "apart", **sections))
    together, report = run_here(tiny_config(tmp_path / "together", colocated=True, **sections))
    assert collected(apart) == collected(together)
    assert final_weights(apart) == final_weights(together)
    assert report["heldout_after"] == plain_report["heldout_after"]
    rows = [row for row in read_metrics(together.metrics_file) if row["kind"] == "rl"]
    assert len(rows) == 2 and all(row["handover_s"] > 0 for row in rows)
    assert all("handover_s" not in row for row in read_metrics(apart.metrics_file))


class Failing(SilentObserver):
    """Fails once, after the second RL step and before it is saved."""

    def __init__(self) -> None:
        self.stage = ""

    def stage_begins(self, name: str, total_steps: int, unit: str = "step") -> None:
        self.stage = name

    def stage_advances(self, step: int, values: Mapping[str, float]) -> None:
        if self.stage == "reinforcement learning" and step == 2:
            raise OSError("no space left on device")


@pytest.mark.slow
def test_a_colocated_run_that_failed_is_resumed_to_the_weights_of_one_that_ran_through(
    tmp_path: Path,
) -> None:
    """The checkpoint that it goes on from was written while the states were in host memory."""
    steps = {"num_steps": 3, "groups_per_step": 2, "group_size": 4, "max_refill_rounds": 2}
    through, _ = run_here(tiny_config(tmp_path / "through", colocated=True, rl=steps))
    config = tiny_config(tmp_path / "cut", colocated=True, rl=steps)
    with pytest.raises(OSError, match="no space"):
        run_here(config, observer=Failing())
    cut, _ = run_here(config, resume=True)
    assert final_weights(cut) == final_weights(through)


class Part:
    """Stands in for a trainer; notes what it is asked for."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.fails = False

    def step(self, groups: list[Any]) -> dict[str, float]:
        self.calls.append("step")
        if self.fails:
            raise RuntimeError("out of memory")
        return {"train_s": 1.0}

    def publish(self) -> str:
        self.calls.append("publish")
        return "manifest"

    def score(self) -> str:
        self.calls.append("score")
        return "scores"

    def offload_states(self) -> None:
        self.calls.append("offload")


class Engine:
    """Stands in for an engine; refuses where a session is held."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.is_used = False

    async def release_memory(self) -> None:
        if self.is_used:
            raise SamplerError("sessions are held")
        self.calls.append("release")


def test_each_has_the_device_when_it_needs_it() -> None:
    async def turns() -> None:
        calls: list[str] = []
        trainer = ColocatedTrainer(LocalHandle(Part(calls)), Engine(calls))
        assert set(await trainer.call(TrainingPart.step, [])) == {"train_s", "handover_s"}
        assert await trainer.call(TrainingPart.publish) == "manifest"
        assert await trainer.call(TrainingPart.score) == "scores"
        assert calls == ["release", "step", "offload", "release", "publish", "score"]

    asyncio.run(turns())


def test_a_step_that_fails_leaves_both_as_between_two_steps() -> None:
    async def turns() -> None:
        calls: list[str] = []
        part = Part(calls)
        trainer = ColocatedTrainer(LocalHandle(part), Engine(calls))
        part.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            await trainer.call(TrainingPart.step, [])
        assert calls[-2:] == ["step", "offload"]
        part.fails = False
        assert "train_s" in await trainer.call(TrainingPart.step, [])

    asyncio.run(turns())


def test_no_step_is_taken_while_a_session_is_held() -> None:
    async def turns() -> None:
        calls: list[str] = []
        engine = Engine(calls)
        trainer = ColocatedTrainer(LocalHandle(Part(calls)), engine)
        engine.is_used = True
        with pytest.raises(SamplerError, match="sessions are held"):
            await trainer.call(TrainingPart.step, [])
        assert "step" not in calls

    asyncio.run(turns())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"executor": "ray"}, 'executor: must be "local" with colocated=true'),
        ({"rl": {"max_staleness": 1}}, r"rl.max_staleness: must be 0 with colocated=true"),
        ({"parallel": {"ranks": 2}}, r"parallel.ranks: must be 1 with colocated=true"),
        ({"engine": {"backend": "vllm"}}, 'engine.backend: must be "etude" with colocated=true'),
    ],
)
def test_what_cannot_take_turns_is_refused_with_the_fix(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message + r".*received .*set colocated=false"):
        RunConfig.model_validate({"colocated": True, **change})
