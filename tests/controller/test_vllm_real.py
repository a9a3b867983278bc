"""A run through vLLM itself, which crashes in mid-step."""

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
from tests.controller.running import (
    changed,
    final_weights,
    num_rl_steps,
    run_elsewhere,
    wait_until,
    weights_of,
)
from tests.controller.test_vllm_run import check_routes, checkpoint, served_steps
from tests.inference.vllm.environment import ENVIRONMENT, vllm_python
from tests.model.transformers_builders import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.foreign]


def real_vllm() -> dict[str, Any]:
    """The section `engine.vllm` that starts vLLM's own environment."""
    return {
        "python": str(vllm_python()),
        "environment": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
    }


def config_of(runs: Path, initial: Path, vllm: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """Two steps of RL; `vllm`: what samples, if not vLLM itself."""
    values: dict[str, Any] = {
        "name": "tiny",
        "runs_directory": str(runs),
        "num_threads": 1,
        "initial_checkpoint": str(initial),
        "agent": {"max_turns": 4, "max_tokens": 384, "max_message_tokens": 48},
        "engine": {"backend": "vllm", "num_slots": 32, "vllm": vllm or real_vllm()},
        "rl": {
            "num_steps": 2,
            "groups_per_step": 3,
            "group_size": 4,
            "updates_per_step": 1,
            "max_refill_rounds": 0,
            "level_weights": [1.0, 0.0, 0.0],
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 1},
        },
        "evaluation": {"num_tasks": 2, "num_samples": 1},
        "checkpoint": {"every_s": 0.001, "curve_every_steps": 0},
    }
    return RunConfig.model_validate({**values, **sections})


def check_parity(path: Path, num_checks: int) -> None:
    rows = read_metrics(path)
    checks = [row for row in rows if row["kind"] == "parity"]
    assert len(checks) >= num_checks and all(row["k3"] < 1e-3 for row in checks)
    sampled = [row for row in rows if row["kind"] == "rl" and "parity_k3" in row]
    assert all(row["parity_k3"] < 1e-3 for row in sampled)


def workers_of(parent: int) -> list[int]:
    """vLLM processes below a process, whose groups their launchers lead."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and "etude_vllm_launch" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_run_of_an_architecture_that_is_not_ours_goes_on_when_its_server_crashes_in_mid_step(
    tmp_path: Path,
) -> None:
    """A mixture of experts: routes come from the server as well."""

    def make(vocab_size: int) -> TransformersModel:
        return tiny_model("glm4_moe", vocab_size=vocab_size)

    initial = checkpoint(tmp_path / "model", make)
    agent = {"max_turns": 2, "max_tokens": 640, "max_message_tokens": 16}
    config = changed(config_of(tmp_path, initial, agent=agent), rl={"keep_routes": True})
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) >= 1, timeout_s=600)
        servers = workers_of(process.pid)
        assert servers
        for pid in servers:
            os.killpg(pid, signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    run = RunDirectory.open(tmp_path / config.name)
    report = run.read_json(run.report_file)
    assert report is not None
    assert report["rl_steps"] == 2
    assert served_steps(run) == {0, 1}
    assert report["throughput"]["decode_tokens"] > 0
    check_parity(run.metrics_file, 3)
    check_routes(run, load_any_model(initial))
    assert final_weights(run) != weights_of(initial), "something was trained"
