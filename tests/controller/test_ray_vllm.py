"""A run over Ray whose engine has the fake of vLLM: the server is killed, and the run goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from etude.model.loading import load_any_model
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.controller.running import changed, num_rl_steps, run_elsewhere, wait_until
from tests.controller.test_ray import processes
from tests.controller.test_vllm_real import check_parity, config_of, workers_of
from tests.controller.test_vllm_run import check_routes, checkpoint, served_steps, small_model
from tests.inference.vllm.environment import fake_vllm
from tests.sandbox.test_lifecycle import eventually

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

_PARTS = ("trainer", "engine", "worker", "evaluation")


def servers() -> list[int]:
    """Processes of vLLM below the engines of runs."""
    return [pid for engine in processes("engine-") for pid in workers_of(engine)]


def test_a_killed_server_is_replaced_and_weights_come_from_a_store(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", small_model)
    parts = {part: {"cpus": 0.3} for part in _PARTS}
    config = changed(
        config_of(tmp_path, initial, fake_vllm(tmp_path / "fake")),
        executor="ray",
        cluster={"heartbeat_s": 0.5, "backoff_s": 0.1, "workers": 1, **parts},
        weights={"url": str(tmp_path / "store")},
        rl={"keep_routes": True},
        agent={"max_turns": 2, "max_message_tokens": 8},
    )
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) >= 1)
        killed = servers()
        assert killed
        os.killpg(killed[0], signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    assert eventually(lambda: not processes("") and not servers(), 60.0), "something outlives the run"
    run = RunDirectory.open(Path(config.runs_directory) / config.name)
    report = run.read_json(run.report_file)
    assert report is not None
    assert report["rl_steps"] == 2
    assert served_steps(run) == {0, 1}
    assert report["throughput"]["decode_tokens"] > 0
    faults = [row for row in read_metrics(run.metrics_file) if row["kind"] == "fault"]
    assert [(row["name"], row["mode"]) for row in faults[:2]] == [
        ("engine-0", "lost"),
        ("engine-0", "restarted"),
    ]
    check_parity(run.metrics_file, 3)
    check_routes(run, load_any_model(initial))
