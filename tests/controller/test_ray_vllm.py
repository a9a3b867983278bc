"""Runs over Ray whose engines are vLLM: the process that samples is killed, and the run goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from etude.model.loading import load_any_model
from etude.model.transformers_model import TransformersModel
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.controller.running import final_weights, num_rl_steps, run_elsewhere, wait_until, weights_of
from tests.controller.test_ray import processes
from tests.controller.test_vllm_real import check_parity, config_of, workers_of
from tests.controller.test_vllm_run import check_routes, checkpoint, served_steps, small_model
from tests.inference.vllm.environment import fake_vllm
from tests.model.transformers_builders import tiny_model
from tests.sandbox.test_lifecycle import eventually

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

_CLUSTER: dict[str, Any] = {
    "heartbeat_s": 0.5,
    "backoff_s": 0.1,
    **{part: {"cpus": 0.3} for part in ("trainer", "engine", "worker", "evaluation")},
}


def over_ray(config: RunConfig, **sections: Any) -> RunConfig:
    """The same run in processes of its own, with other values in some sections."""
    tree = config.model_dump(mode="json", exclude_none=True)
    for name, values in {"executor": "ray", "cluster": _CLUSTER, **sections}.items():
        tree[name] = {**tree[name], **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(tree)


def servers() -> list[int]:
    """Processes of vLLM below the engines of runs."""
    return [pid for engine in processes("engine-") for pid in workers_of(engine)]


def finished(config: RunConfig) -> tuple[RunDirectory, dict[str, Any]]:
    """The run, whose server is killed in its second step, and its report."""
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) >= 1, timeout_s=600)
        killed = servers()
        assert killed
        os.killpg(killed[0], signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    assert eventually(lambda: not processes("") and not servers(), 60.0), "something outlives the run"
    run = RunDirectory.open(Path(config.runs_directory) / config.name)
    report = run.read_json(run.report_file)
    assert report is not None
    return run, report


def check(run: RunDirectory, report: dict[str, Any]) -> None:
    """It is whole, and the engine's process was replaced."""
    assert report["rl_steps"] == 2
    assert served_steps(run) == {0, 1}
    assert report["throughput"]["decode_tokens"] > 0
    faults = [row for row in read_metrics(run.metrics_file) if row["kind"] == "fault"]
    assert [(row["name"], row["mode"]) for row in faults[:2]] == [
        ("engine-0", "lost"),
        ("engine-0", "restarted"),
    ]
    check_parity(run.metrics_file, 3)


def test_a_killed_server_is_replaced_and_weights_come_from_a_store(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", small_model)
    local = config_of(tmp_path, initial, fake_vllm(tmp_path / "fake"))
    config = over_ray(
        local,
        cluster={**_CLUSTER, "workers": 1},
        weights={"url": str(tmp_path / "store")},
        rl={"keep_routes": True},
        agent={"max_turns": 2, "max_message_tokens": 8},
    )
    run, report = finished(config)
    check(run, report)
    check_routes(run, load_any_model(initial))


def test_an_architecture_that_is_not_ours_trains_though_vllm_itself_is_killed(tmp_path: Path) -> None:
    def make(vocab_size: int) -> TransformersModel:
        return tiny_model("glm4_moe", vocab_size=vocab_size)

    initial = checkpoint(tmp_path / "model", make)
    agent = {"max_turns": 2, "max_tokens": 640, "max_message_tokens": 16}
    run, report = finished(over_ray(config_of(tmp_path, initial, agent=agent), rl={"keep_routes": True}))
    check(run, report)
    check_routes(run, load_any_model(initial))
    assert final_weights(run) != weights_of(initial), "something was trained"
